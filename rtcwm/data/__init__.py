"""Clips on disk, the embedded world and its codec."""
