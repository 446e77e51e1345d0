"""Layers whose recurrence is explicit: they have no solver and no statistics.

`recurrent`        the interface that they share, which the baselines have, too
`delta_product`    memories by the delta rule, several steps a token; `delta_net`: one step
`gated_delta_net`  one step with a slow decay, the memory of `tracking`
`tracker`          heads that read themselves and what a memory recalls
`tracking`         TrackingDeltaNet: a memory and trackers that read it
"""
