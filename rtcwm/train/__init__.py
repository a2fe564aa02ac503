"""The programs that users start, and what they share: data sets, settings, records."""
