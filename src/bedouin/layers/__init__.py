"""The layers: `bedouin`, defined by a fixed point (`fixed_point`), `tracking` and `delta_net` with
explicit recurrences, and what they share (`common`)."""
