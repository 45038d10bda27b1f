"""The Spark sink and Spark's Kafka sink under faults: rows missing, duplicated and out of order, counted in Kafka.
`python -m tests.spark_faults` prints the table."""
