"""`rtcwm clips`: folders of clips checked, flagged, and made from the caches of other trainers."""
