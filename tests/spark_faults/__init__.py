"""The Spark sink under faults, beside Spark's own Kafka sink: rows missing, twice and out of order, counted from Kafka.
`python -m tests.spark_faults` prints the table."""
