def pytest_configure(config):
    config.addinivalue_line("markers", "slow: runs other libraries; takes more than a few seconds")
