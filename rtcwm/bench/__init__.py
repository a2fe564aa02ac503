"""Measures what rtcwm does in a second, against the loop that one would write first."""
