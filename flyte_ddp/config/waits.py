"""Timeouts and intervals that several packages share, in seconds. Others are beside their use."""

# time between two looks at a stop request, a log or a process, which send no message
POLL_INTERVAL = 0.1
# Time between two heartbeats, and between two requests to another machine. Several must be lost
# before anything counts as lost, and one costs next to nothing.
BEAT_INTERVAL = 1.0
# time until a process or machine that does not answer counts as absent, even a busy one
ANSWER_TIMEOUT = 5.0
# time between two progress lines, for people who read a log
LINE_INTERVAL = 10.0
