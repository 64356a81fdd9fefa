"""Engines that fail, each in one way, and a small model; `test_cli.py` names them as a user names their own."""
