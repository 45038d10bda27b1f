"""Drivers with a clock, for the state machines of expansions, groups, transactions and sequencers."""
