"""Preparation: stream caches from users' videos, proxies and captions."""
