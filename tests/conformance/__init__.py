import pytest

# Cases assert as tests do, and are read as such where they fail.
pytest.register_assert_rewrite("tests.conformance.cases")
