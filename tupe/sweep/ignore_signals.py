"""Imported first by the process that jobs are copied from (`runner.Copy`): signals to our process group leave it alone,
because it has to tell how its copies end. The runner passes them on."""

import signal

from ..run import stop

for number in stop.SIGNALS:
    signal.signal(number, signal.SIG_IGN)
