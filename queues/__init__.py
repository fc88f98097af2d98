"""A job queue on Redis Streams: nothing is lost, nothing is answered twice, everything dropped is counted.

producer = JobProducer(url)            # blocking: put
consumer = JobConsumer(url)            # asyncio: take → finish or fail
reader = ResultReader(url)             # asyncio: read
letters = DeadLetters(url)             # blocking, for the operator: newest, retry, drop
server = EmbeddedServer()              # where there is no Redis: server.url
"""

from queues.address import parse_address, safe_url
from queues.config import QueueConfig
from queues.connection import CURABLE, connect, connect_async
from queues.consumer import JobConsumer, forget_queue
from queues.dead_letters import DeadLetter, DeadLetters
from queues.embedded import EmbeddedServer
from queues.errors import (
    JobTooLarge,
    QueueError,
    QueueFull,
    QueueUnavailable,
    ServerError,
    ServerRefuses,
    ServerStartFailed,
    ServerTooOld,
)
from queues.outage import Outage
from queues.permissions import rules
from queues.producer import JobProducer
from queues.results import ResultReader
from queues.types import Delivery, Job, QueueStatus, Result

__all__ = [
    "CURABLE",
    "DeadLetter",
    "DeadLetters",
    "Delivery",
    "EmbeddedServer",
    "Job",
    "JobConsumer",
    "JobProducer",
    "JobTooLarge",
    "Outage",
    "QueueConfig",
    "QueueError",
    "QueueFull",
    "QueueStatus",
    "QueueUnavailable",
    "Result",
    "ResultReader",
    "ServerError",
    "ServerRefuses",
    "ServerStartFailed",
    "ServerTooOld",
    "connect",
    "connect_async",
    "forget_queue",
    "parse_address",
    "rules",
    "safe_url",
]
