"""The whole recipe over seeds and variants on the embedded world, by the real programs; `rtcwm recipe`."""
