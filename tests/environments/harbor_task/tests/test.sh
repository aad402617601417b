#!/bin/bash

# Install test dependencies here for shared mode, or in tests/Dockerfile for separate mode.
# Use this file to verify the task and generate a reward.
# It will be copied to /tests/test.sh and run from the working directory.

# Make sure to output a reward to /logs/verifier/reward.txt.
# Or optionally, multiple rewards to /logs/verifier/rewards.json (key-value pairs).
if [ "$(cat hello.txt)" = "Hello, world!" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
