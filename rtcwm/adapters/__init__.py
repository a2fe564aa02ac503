"""`rtcwm export` and `rtcwm adapter`: adapters of other programs, in and out, looked at and compared."""
