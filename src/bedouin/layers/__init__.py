"""The layers: `bedouin` and `rnn`, defined by a fixed point (`fixed_point`), `tracking` and
`delta_net`, whose recurrence is explicit, and what they share (`common`)."""
