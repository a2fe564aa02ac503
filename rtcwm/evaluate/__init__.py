"""Streams of trained models measured against the truth."""
