"""The S3 server of these tests."""

from tests.objectstore import moto_address, s3

__all__ = ["moto_address", "s3"]
