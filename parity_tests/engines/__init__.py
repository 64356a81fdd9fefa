"""Engines that fail, each in one way, and small models; tests name them as a user names their own."""
