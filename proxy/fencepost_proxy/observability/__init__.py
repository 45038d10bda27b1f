"""What the process shows of itself: metrics, status pages, warnings, advice."""
