"""Replaces test/service.py, which kafka-python's sdist lacks. With a running Kafka, its tests need only the names."""


class ExternalService:
    def __init__(self, host, port):
        self.host, self.port = host, port

    def open(self):
        pass

    close = open


class SpawnedService:
    pass
