"""When Spark's Java dies inside an application that let the syphon start it."""

import os
import signal
import subprocess
import sys

from tests.spark.twins import QUEUE, Twins, until

_APPLICATION = """
import logging, os, sys
from pyspark import SparkContext
from twinbus.syphon.syphon import Syphon, SyphonSettings
from datetime import timedelta

logging.basicConfig(stream=sys.stdout, level=logging.ERROR)
settings = SyphonSettings(
    primary=os.environ["PRIMARY"],
    secondary=os.environ["SECONDARY"],
    queues=tuple(os.environ["QUEUES"].split(",")),
    lease=timedelta(seconds=3),
)
with Syphon(settings) as syphon:
    syphon.wait_until_running()
    print("java", SparkContext._gateway.proc.pid, flush=True)
    sys.stdin.read()
"""


def test_the_syphon_starts_spark_again_when_its_java_dies(twins: Twins) -> None:
    twins.primary.queue()
    environment = {
        **os.environ,
        "PRIMARY": twins.primary.connection,
        "SECONDARY": twins.secondary.connection,
        "QUEUES": ",".join(twins.queues),
    }
    application = subprocess.Popen(
        [sys.executable, "-c", _APPLICATION],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert application.stdin is not None
    assert application.stdout is not None
    try:
        before = twins.divert_ids(["1", "2", "3"])
        java = application.stdout.readline().split()
        assert java[0] == "java", java
        until(lambda: twins.primary.count() == len(before), "the first are home")
        os.kill(int(java[1]), signal.SIGKILL)
        after = twins.divert_ids(["4", "5", "6"])
        until(lambda: twins.primary.count() == len(before + after), "the others are home, too")
        assert twins.primary.ids(QUEUE) == before + after
        application.stdin.close()
        assert application.wait(60) == 0
        assert "Spark's Java died and is restarted" in application.stdout.read()
    finally:
        application.kill()
        application.wait()
        application.stdout.close()
