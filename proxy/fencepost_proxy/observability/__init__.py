"""What the process shows of itself: metrics, the status page, problems and what to do."""
