import pytest

# Show the values of failed assertions in cases.
pytest.register_assert_rewrite("tests.conformance.cases")
