"""TLC checks `specification/`: each design against its promises, and each rule by leaving it out."""
