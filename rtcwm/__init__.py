"""rtcwm: training of streaming causal world models on a frozen, ZeRO-3 partitioned MiniMax-H3."""

__version__ = "0.1.0"
