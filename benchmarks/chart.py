from benchmarks.results import Report


def svg(report: Report) -> str:
    return ""
