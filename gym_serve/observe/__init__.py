"""What a graph does, in numbers: metrics that every server records, and that an exporter publishes."""
