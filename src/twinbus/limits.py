"""Every bound and default of Twinbus, each with the reason for its number.

Times inside the broker are whole microseconds since 1970 (UTC), so that they fit a column.
"""

from datetime import timedelta
from typing import Final

SECOND_US: Final = 1_000_000
DAY_US: Final = 86_400 * SECOND_US
MEGABYTE: Final = 1024 * 1024
MAX_INT64: Final = 2**63 - 1  # the largest value of a column of whole numbers
NEVER_US: Final = MAX_INT64  # later than any time: sorts last and needs no special case
UNLIMITED: Final = timedelta.max

# Messages
MAX_MESSAGE_BYTES: Final = 256 * 1024  # the Standard tier of Service Bus; code written for it fits
MAX_BATCH_BYTES: Final = 64 * 1024 * 1024  # one commit record stays far below Arrow's 2 GiB columns
MAX_BATCH_MESSAGES: Final = 100_000  # bounds the time the one writer spends on one command
MAX_ID_CHARACTERS: Final = 128  # message_id, session_id and partition_key, as in Service Bus
MAX_PROPERTY_NAME_CHARACTERS: Final = 256
FEW_MESSAGES: Final = 16  # null columns up to this length are cached: most sends have few messages
DRAWN_IDS: Final = 256  # ids drawn at once: a draw is a system call, in which threads switch
SHOWN_CHARACTERS: Final = 40  # of a wrong text, in an error
SHOWN_SCHEME_LETTERS: Final = 8  # of an unknown endpoint; a longer text may be part of a key
PING_CONTENT_TYPE: Final = "application/vnd.ms-servicebus-ping"
PING_ROOM_SHARE: Final = 10  # a ping needs a tenth of the entity, or room for the largest message

# Entities
MAX_PATH_CHARACTERS: Final = 260  # as in Service Bus
MAX_SUBSCRIPTION_NAME_CHARACTERS: Final = 50  # as in Service Bus
MAX_ADDRESS_CHARACTERS: Final = 512  # a path with subscription and dead-letter queue, and to spare
MAX_USER_METADATA_CHARACTERS: Final = 1024
MAX_SIZE_MEGABYTES: Final = 81_920  # 16 partitions of the largest Standard queue (5120)
DEFAULT_SIZE_MEGABYTES: Final = 1024
DEFAULT_MAX_DELIVERY_COUNT: Final = 10
MAX_MAX_DELIVERY_COUNT: Final = 2**31 - 1  # of backlog queues: effectively unlimited
DEFAULT_LOCK_DURATION: Final = timedelta(minutes=1)
MIN_LOCK_DURATION: Final = timedelta(seconds=1)
MAX_LOCK_DURATION: Final = timedelta(minutes=5)  # consumers renew it for work that takes longer
MIN_AUTO_DELETE_ON_IDLE: Final = timedelta(minutes=5)  # shorter would race an ordinary restart
MIN_TIME_TO_LIVE: Final = timedelta(seconds=1)
DEFAULT_DUPLICATE_WINDOW: Final = timedelta(minutes=10)
MIN_DUPLICATE_WINDOW: Final = timedelta(seconds=20)
MAX_DUPLICATE_WINDOW: Final = timedelta(days=7)
PARTITION_COUNT: Final = 16  # message stores of a partitioned entity, as in Service Bus
MAX_FORWARD_HOPS: Final = 4  # a longer chain is a mistake or a loop
MAX_FOUND_PATHS: Final = 4096  # spellings of paths whose queue the broker remembers
FORWARD_RETRY_US: Final = 1 * SECOND_US  # a parked message tries its forward target this often
MAX_SQL_CHARACTERS: Final = 1024  # of a filter or action, as in Service Bus
MAX_SQL_DEPTH: Final = 32  # nesting of brackets and operators: Python's stack holds 1000
MAX_ACTION_STEPS: Final = 16  # of SET and REMOVE; each rewrites the properties of every copy
MAX_JOINED_BYTES: Final = 4 * MAX_MESSAGE_BYTES  # of a text that a rule joins: each + may double it
MAX_WILDCARDS: Final = 16  # of a LIKE pattern; matching time grows with each wildcard
LIKE_OPERATORS: Final = 10  # the weight of one LIKE: it reads every character of a text
MAX_RULE_OPERATORS: Final = 200  # of one filter or action: as many as 18 LIKEs joined by AND have
MAX_SUBSCRIPTION_OPERATORS: Final = 1000  # of all its rules: each is evaluated for every message
MAX_TOPIC_OPERATORS: Final = 10_000  # of all its subscriptions: some 100 ms for one message
MAX_RULE_VALUES: Final = 64  # parameters or properties of one filter or action
MAX_RULE_VALUE_BYTES: Final = 1024  # a pattern of that length still compiles
MAX_RULES: Final = 100  # of one subscription: each is evaluated for every message of its topic
MAX_ENTITIES: Final = 10_000  # of a namespace, as in Service Bus; every segment describes them all
MAX_SUBSCRIPTIONS: Final = 2000  # of one topic, as in Service Bus
MIN_QUOTA_BYTES: Final = 64  # the minimum size of a message for quotas: the memory of its row
SESSION_QUOTA_BYTES: Final = 512  # the size of a session with messages for quotas: its memory
MAX_REASON_CHARACTERS: Final = 4096  # of a dead-letter reason and of its description
# For duplicate detection, per entity; some 600 MB. Only sends that were acknowledged from the spill
# store may exceed it.
MAX_REMEMBERED_IDS: Final = 4_000_000
REMEMBERED_ID_BYTES: Final = 150  # of memory: an id of 36 characters, its time, its place in a dict
FORGET_INTERVAL_US: Final = 1 * SECOND_US  # between two searches for old ids while memory is full

# Turns: how long the requests of one key delay those of others
TURN_WORK: Final = 1000  # of one turn, in ordinary commands of some 30 µs: at most 30 ms
SERVING_WORK: Final = 250  # of a turn, for requests that wait at queues, however full the turn is
SMALL_WORK: Final = 10  # with no more work, a key's first request is in the next turn
LISTING_WORK: Final = 100  # of a list of entities, sessions, rules, keys or counts
WORK_MESSAGES: Final = 64  # stored, delivered or settled in the time of an ordinary command
WORK_BYTES: Final = 8 * 1024  # of delivered messages: read and copied in that time
WORK_ROWS: Final = 4096  # the rows that a search reads in that time
WORK_OPERATORS: Final = 4  # of rules, evaluated for the sends of a turn in that time
WORK_RULE_BYTES: Final = 128 * 1024  # of messages, times operators: evaluated in that time

# Receiving
MAX_RECEIVE_MESSAGES: Final = 10_000  # bounds the time the one writer spends on one command
MAX_RECEIVE_BYTES: Final = 16 * 1024 * 1024  # bounds the memory of one reply
MAX_WAIT: Final = timedelta(hours=24)  # of a long poll: hours, but not forever
MAX_SESSION_STATE_BYTES: Final = 256 * 1024
MAX_LOCKED_SESSIONS: Final = 10_000  # locked sessions of one entity
MAX_LISTED_SESSIONS: Final = 10_000  # of one reply; each name has up to 128 characters
MAX_OWNER_CHARACTERS: Final = 256  # of a lease: a host, a process and a name
MAX_LEASES: Final = 1000  # of one queue: ten syphons with all the ranges they may keep
MAX_LEASE_INTERVALS: Final = 10_000  # of one lease; the log holds each
MAX_DEAD_LETTER_PARTS: Final = 1000  # of one settlement; each has its own reason
SCAN_ROWS: Final = 4096  # looked at in one step by a search for deliverable messages
SHOWN_LOST: Final = 100  # sequence numbers or lock tokens that an error names
DEFAULT_LEASE_DURATION: Final = timedelta(minutes=1)
MAX_LEASE_DURATION: Final = timedelta(hours=1)  # a dead syphon blocks its range no longer than this
MAX_LEASE_MESSAGES: Final = 1_000_000  # one Spark micro-batch; the state change is one vector step

# Transfers
MAX_ORIGIN_CHARACTERS: Final = MAX_PATH_CHARACTERS + 192  # a path, a number and two nonces
MAX_ORIGIN_DEPTH: Final = 3  # a backlog queue, a sender, a spill store
KNOWN_SENDERS: Final = 10_000  # per key: remembered senders, and sends of Spark's writers
KNOWN_SENDERS_IN_ALL: Final = 100_000  # of all keys together; some 30 MB
KNOWN_GAPS: Final = 1000  # in the numbers of one sender: sends that were refused
KNOWN_INTERVALS: Final = 50_000  # per key, over all its senders; some 5 MB
TRANSFER_ORIGINS: Final = 10_000  # per key of one entity: queues it may name for the first time
TRANSFER_INTERVALS: Final = 100_000  # per key of one entity, over these queues; some 10 MB
NONCE_BYTES: Final = 16  # in names that must not be guessable

# The log
SEGMENT_BYTES: Final = 64 * 1024 * 1024  # small enough to compact in pieces, large enough to be few
SPARE_SEGMENTS: Final = 2  # files kept for reuse: the next segment, and one more
COMPACTION_STEP_BYTES: Final = 2 * 1024 * 1024  # live bytes moved per turn: a few milliseconds
MOVED_PLACE_BYTES: Final = 80  # of a message that is moved, besides its content
FIRST_STEP_DIVISOR: Final = 4  # of the reserve, for a first step: it measures how messages grow
COMPACTION_STEP_QUEUES: Final = 256  # searched for live bytes per turn: 1 ms if all are empty
COMPACTION_GARBAGE_RATIO: Final = (
    0.5  # rewrite when half is dead: writes stay within twice the data
)
ZERO_AHEAD_BYTES: Final = 64 * 1024  # some forty small records; a sync then changes no metadata
GATHER_S: Final = 0.001  # wait of a turn for more requests: enough for fifty callers to send again
MAX_FACTS_BYTES: Final = 256 * 1024 * 1024  # of one part of a record: far below Arrow's 2 GiB
CARRIED_ID_BYTES: Final = 512  # of a message id in a record: 128 characters of up to 4 bytes
RESERVE_BYTES: Final = 16 * 1024 * 1024  # kept free for settlements while the disk is full
MAX_WRITE_BUFFERS: Final = 1024  # of one system call: IOV_MAX on Linux
OPEN_RECORDS: Final = 64  # decoded records kept at hand; each is a view of a mapped file
READ_AHEAD_BYTES: Final = 64 * 1024  # of a batch that is delivered one message at a time

# Storage trouble
SLOW_COMMIT_US: Final = 1 * SECOND_US  # a healthy commit takes milliseconds
SLOW_COMMITS_TO_SPILL: Final = 3  # in a row; a single slow commit is common
SPILL_RETRY_US: Final = 1 * SECOND_US  # how often a refusing store is tried again
SPILL_DRAIN_SENDS: Final = 64  # spilled sends moved per turn: other requests go in between
SPILL_BOUND_US: Final = 900 * SECOND_US  # sends that wait in the spill store longer: degraded
SLOW_FLUSH_US: Final = SECOND_US // 2  # a flush that takes longer is logged; half of SLOW_COMMIT_US
SPILL_FAILURE_PAUSE_US: Final = 60 * SECOND_US  # before a spilled send that failed is tried again
MAX_SPILL_BYTES: Final = 4 * 1024**3  # of the spill store; beyond, sends are refused

# Logging
LOG_INTERVAL_US: Final = 10 * SECOND_US  # between two lines about the same key, or slow flushes
LOGGED_RULES: Final = 100  # rules whose failures have a log line each; the others share one
LOGGED_LIBRARY_LINES: Final = 32  # kinds of lines of uvicorn and asyncio; the others share one
LOGGED_KEY_NAMES: Final = 1000  # in one interval; clients choose them; the rest share a line

# Time
CLOCK_STEP_US: Final = 1 * SECOND_US  # a larger difference is a clock that was set, not a drift
CLOCK_CONFIRM_US: Final = 1 * SECOND_US  # a clock step is accepted if it lasts this long
MAX_SLEEP_S: Final = 3600.0  # longer ones overflow the timers of some platforms
MAX_SPAN_CHARACTERS: Final = 60  # the longest time with all its units has half as many
CLOCK_LOOK_S: Final = 1.0  # how often an idle broker looks at the wall clock

# Throttling (None: that facet is not limited)
DEFAULT_OPERATIONS_PER_SECOND: Final = None
DEFAULT_ENTITY_OPERATIONS_PER_SECOND: Final = None
DEFAULT_MEMORY_BYTES: Final = 8 * 1024**3  # of columns and ids: over 100 million waiting messages
DEFAULT_STORAGE_BYTES: Final = None
DEFAULT_OPEN_RECEIVES: Final = 10_000
KEY_RATE_SHARE: Final = 0.8  # of the namespace's rate that one key may take
KEY_SHARE: Final = 0.25  # of the open receives that one key may take
MANAGE_RESERVE: Final = 0.1  # of the open receives and of rates that only Manage keys may use
SERVER_BUSY_RETRY_S: Final = 10  # the retry delay in ServerBusyError

# Access
KEY_BYTES: Final = 32  # as many as the HMAC's digest: more would not make it stronger
MAX_SECRET_CHARACTERS: Final = 256  # 32 bytes in base64, and to spare
MAX_KEYS: Final = 1000  # each start of a segment writes them all
MAX_TOKEN_CHARACTERS: Final = 4096  # a path, a name and a digest, quoted
TOKEN_LIFE: Final = timedelta(hours=1)  # a stolen token expires after this
TOKEN_GRACE_US: Final = 2 * SECOND_US  # for clients to notice that a clock was set
TOKEN_RENEWAL: Final = 0.2  # a client signs a new one when this part of its life is left

# Clients
TRY_TIMEOUT: Final = timedelta(seconds=5)  # of one try of an operation
DEFAULT_WAIT: Final = timedelta(seconds=60)  # of a receive
MIN_POLICY_SPAN: Final = timedelta(microseconds=1)  # the shortest time in a retry policy
MAX_POLICY_SPAN: Final = timedelta(days=365)
OPERATION_TIMEOUT: Final = timedelta(seconds=60)
MIN_BACKOFF: Final = timedelta(milliseconds=100)  # a broker that heals itself takes about that
MAX_BACKOFF: Final = timedelta(seconds=10)  # a client is back soon after a long outage
MAX_CLOSE_WAIT: Final = timedelta(seconds=5)  # how long `close` waits for operations in flight
PIPELINE_MESSAGES: Final = 1000  # of one send; larger ones are no faster, and fail more at once
PIPELINE_BYTES: Final = 1024 * 1024  # of one send
PIPELINE_SENDS: Final = 4  # in flight: one on the disk, one decoded, one on the wire, one encoded
PIPELINE_BACKLOG: Final = 100_000  # messages that wait for their turn before `send` blocks
WAITING_AIO_THREADS: Final = 512  # each receive that waits in an asyncio factory takes one
WORKING_AIO_THREADS: Final = 64  # for everything else: many requests share one connection
RENEWAL_MARGIN: Final = 0.5  # a lock is renewed when this part of it is left
REMEMBERED_ORIGINS: Final = 100_000  # of a consumer that drops repeats; some 15 MB
MAX_REMEMBERED_ORIGINS: Final = 10_000_000  # some 1.5 GB of memory, or 1 GB on disk

# Pairing
DEFAULT_BACKLOG_QUEUES: Final = 10  # if one fails, nine are left
MAX_BACKLOG_QUEUES: Final = 1000  # each costs the syphon its own polls
BACKLOG_SIZE_MEGABYTES: Final = 5120  # the largest queue of the Standard tier
DEFAULT_FAILOVER_INTERVAL: Final = timedelta(minutes=1)
MAX_FAILOVER_INTERVAL: Final = timedelta(minutes=60)
DEFAULT_PING_INTERVAL: Final = timedelta(minutes=1)
MIN_PING_INTERVAL: Final = timedelta(seconds=1)
MAX_PING_INTERVAL: Final = timedelta(minutes=30)
PING_TIME_TO_LIVE: Final = timedelta(seconds=1)  # a broker that stores the ping drops it soon
CREATE_TRIES: Final = 3
CREATE_PAUSE: Final = timedelta(seconds=30)  # a broker that restarts is back by then
PARTNER_GRACE: Final = timedelta(seconds=5)  # for a factory to be closed after its partner was
TICK_RETRY_US: Final = 1 * SECOND_US  # after a tick of a pairing that failed
TRANSITIONS_RETRY_US: Final = 10 * SECOND_US  # after a write of its ledger that failed
REMEMBERED_SCHEDULES: Final = 100_000  # diverted scheduled messages that a sender can still cancel
SWITCH_PAUSE: Final = timedelta(seconds=5)  # how long sends wait for the last diverted messages
SWITCH_LOOK_US: Final = SECOND_US // 10  # between looks during that pause; a look is one browse
SWITCH_STEP_US: Final = SECOND_US // 50  # after which a waiting send checks whether it may go on
LOOK_MESSAGES: Final = 250  # of one look into a backlog queue; Service Bus browses no more at once
LOOK_BYTES: Final = 1 << 20  # of one look: only their properties matter

# Traces
MAX_TRACED_CONTEXTS: Final = 128  # links, or spans, of one batch; OpenTelemetry's limit of links

# The syphon and the data source
CARRIED_BYTES: Final = 8 * 1024 * 1024  # of one send; a worker reads the next one meanwhile
RUNS_AT_ONCE: Final = 32  # sends to one destination, each of another sender
CARRY_TIMEOUT: Final = timedelta(seconds=10)  # the longest delay of a batch by one destination
DESTINATION_BUDGET_S: Final = 5.0  # of sends to a destination in a range; the next batch continues
TRIAL_TIMEOUT_S: Final = 2.0  # of sends to a destination that failed before
TRIAL_MESSAGES: Final = 100  # of a first try: a working destination answers within TRIAL_TIMEOUT_S
TRIAL_ROUND: Final = 8  # trials: each sends half as many messages, the last one a single message
MAX_SPARK_STARTS: Final = 5  # restarts of Spark without a finished batch between them
RANGE_MESSAGES: Final = 50_000  # of one queue in one batch; after a kill at most these are resent
MAX_RANGES_PER_QUEUE: Final = 64  # side by side: more tasks than that wait for each other
MAX_LEASED_RANGES: Final = 100  # of one queue, while destinations fail: a hundred million messages
CROWDED_RANGES: Final = 16  # from here on, ranges of a queue are merged: each lease must be renewed
SYPHON_LEASE: Final = timedelta(seconds=30)  # the time until another syphon takes over after a kill
MIN_SYPHON_LEASE: Final = timedelta(seconds=3)
SYPHON_POLL: Final = timedelta(minutes=15)  # of an idle backlog queue; ten send 40 polls an hour
QUEUE_LOOK_PAUSE: Final = timedelta(seconds=2)  # before the first look for missing backlog queues
DEFAULT_RETRY_INTERVAL: Final = timedelta(seconds=1)  # of a destination that failed
MIN_RETRY_INTERVAL: Final = timedelta(seconds=1)
MAX_RETRY_INTERVAL: Final = timedelta(minutes=2)
MAX_RESTART_PAUSE: Final = timedelta(seconds=15)  # before a query that Spark gave up runs again
RETRY_GROWTH: Final = 16  # the longest pause, as a multiple of the retry interval
POLL_GATHER_S: Final = 0.05  # how long a batch waits for the answers of further queues
POLL_GRACE_S: Final = 2.0  # for an answer that is due at once
POLL_TRIES: Final = 5  # tries to read a queue before `--once` skips it
BATCH_PATIENCE_S: Final = 1.0  # the longest wait for work; a stop is noticed within this time
SETTLE_TIMEOUT_S: Final = 10.0
VISIT_S: Final = 10.0  # of a task that receives under lock: locks of backlog queues last a minute
LOCK_RENEWALS: Final = 3  # of a visit per lock duration: one may fail without a loss
VISIT_RECEIVE_MESSAGES: Final = 2000  # of one receive under lock: a worker has two in memory
MAX_VISIT_LOCKED: Final = 2000  # messages that a visit keeps locked to reach those behind them
MAX_VISIT_PAUSE: Final = timedelta(seconds=30)  # before a queue of failing destinations is visited
QUERY_LOOK_S: Final = 0.25  # how often the query is checked
SPARK_START_S: Final = 300.0  # for Spark to start and to list the backlog
LAST_BATCH_S: Final = 30.0  # for the current batch when a syphon stops; ending it early is safe
RATE_WINDOW_US: Final = 10 * SECOND_US  # over which the messages a second are counted
KEPT_NOTES: Final = 200  # of a planner, until the application logs them
TASK_TRIES: Final = 4  # by Spark on one machine, as on a cluster: a worker may be killed
OLDEST_JAVA: Final = 17  # the oldest version that Spark 4 runs on
STREAM_BATCH_MESSAGES: Final = 100_000  # a micro-batch has 0.3 s of overhead
STREAM_BATCH_BYTES: Final = 256 * 1024 * 1024
STREAM_PARTITIONS: Final = 4
STREAM_TASK_MESSAGES: Final = 25_000  # of one task; starting a task takes as long as some thousand
MAX_TRANSACTION_VERSION: Final = 2**27 - 1  # the rest of 63 bits numbers the rows of a partition
SINK_BATCH_MESSAGES: Final = 10_000  # of one send

# Ledgers
LEDGER_BUCKET: Final = timedelta(minutes=1)
LEDGER_ROLL_INTERVAL: Final = timedelta(minutes=1)  # a kill loses at most the counts of this time
LEDGER_RETENTION: Final = timedelta(days=90)
LEDGER_BYTES: Final = 10 * 1024**3  # of a namespace: three days at 1000 messages a second
CLIENT_LEDGER_BYTES: Final = 1024**3  # of operations that clients count: years of a few entities
CLIENT_LEDGER_BUCKETS: Final = 1440  # kept while the disk refuses: a day; beyond, the oldest go
MIN_LEDGER_BYTES: Final = 64 * 1024  # a few small files
LEDGER_TRIM_RATIO: Final = 0.9  # of the bound is kept: files go in large groups, not one by one
LEDGER_FILE_ROWS: Final = 131_072  # one row group; until it is written, its ids are in memory
SMALL_FILE_ROWS: Final = LEDGER_FILE_ROWS // 2  # of finished days: smaller files are merged
MERGED_DAYS: Final = timedelta(days=3)  # merged at a start; later, each day is merged at its end
MERGED_FILES: Final = 10_000  # into one: their names take 400 KB of its footer
LEDGER_JOURNAL_BYTES: Final = 16 * 1024 * 1024  # of transfers, about 100,000
LEDGER_LOOK_S: Final = 5.0  # between two checks of the journals of transfers
LEDGER_PAUSE_US: Final = SECOND_US // 20  # between two checks of a write in progress
LEDGER_PATIENCE_US: Final = 30 * SECOND_US  # with a disk that does not answer
LEDGER_RUN: Final = 100_000  # sequence numbers of one row: the most that a reader expands at once
LEDGER_BUFFERED_ROWS: Final = (
    8_000_000  # while the disk refuses writes; beyond, the oldest are lost
)
UNSEEN_EVENTS: Final = 100  # of a pairing, kept for its first watcher
KEPT_TRANSITIONS: Final = 10_000  # of a pairing, while its disk refuses
INVENTORY_INTERVAL: Final = timedelta(hours=1)  # between two inventories

# Reports and estimates
MAX_PLAN_RATE: Final = 1_000_000_000  # a second; a larger number is a typing error
MAX_OPERATIONS: Final = 10**15  # of a month or a tier of prices; sums stay exact
MAX_PRICE: Final = 1_000_000  # of anything on a sheet; a larger number is a typing error
LEDGER_READERS: Final = 8  # files at once: footers are small, so latency dominates
REPORT_PARTITION_ROWS: Final = 500_000  # of a bucket: its arrays and tables take some 300 MB
REPORT_TASK_ROWS: Final = 50_000  # fewer are not divided: a task takes some time to start
FILE_WEIGHT: Final = 1_000  # rows that are read in the time in which a file is opened
SURVEY_TRIES: Final = 5  # looks at ledgers while files of them are merged or deleted, once a day
REPORT_TRIES: Final = 5  # of a report whose files were merged or deleted while Spark read them
BLOCK_BITS: Final = 16  # a queue is divided into blocks of 65,536 numbers, which tasks share
FLOW_STEPS: Final = 101  # of the chart of diverted messages
LEAST_DELAY, DELAY_STEPS = -10, 48  # powers of two of a second: from a millisecond to 4000 years
LOCAL_ROWS: Final = 100_000  # of a report, in the driver's memory: 20 MB; more stay in Spark
REPORT_LISTED_FILES: Final = 1_000_000  # by the driver: a task for each file takes longer
REPORT_TASKS: Final = 64  # of one job, at least: the memory of the driver contains their sums
REPORT_LISTED: Final = 1_000  # outages, and destinations of transfers: a page has no space for more
REPORT_SUSPECTS: Final = 100  # the first; a person reads no more
REPORT_ENTITIES: Final = 20  # the busiest; a person looks at no more
CHART_LANES: Final = 20  # of one chart; a reader cannot distinguish more
CHART_LETTERS: Final = 40  # of a name in a chart

# The command line
MAX_CONNECTION_BYTES: Final = 64 * 1024  # of a file with a connection string of a few hundred
MIN_CLI_TIMEOUT: Final = timedelta(milliseconds=1)
MAX_CLI_COUNT: Final = 10**9  # of --count and --max; a larger number is a typing error
CLI_BATCH_MESSAGES: Final = 1000  # per operation of a bulk command
CLI_BATCH_BYTES: Final = 8 * 1024 * 1024  # of bodies, after which a batch is sent
PROGRESS_LOOK_S: Final = 0.5  # between two looks at the progress of a syphon
PROGRESS_LINE_LOOKS: Final = 10  # between two printed lines, where no terminal is
TROUBLE_REPEAT_S: Final = 60.0  # after which the same trouble is printed again

# The wire
DEFAULT_PORT: Final = 4617  # no well-known service uses it
ALLOWED_REMEMBERED: Final = 256  # commands and paths that a token was found to allow
FIRST_WIRE_VERSION: Final = 2  # the oldest that servers accept; 1 had another transport
WIRE_VERSION: Final = 2
MAX_GREETING_BYTES: Final = 8 * 1024  # of the first frame of a connection: a token fits twice
MAX_HEAD_BYTES: Final = 1024 * 1024  # of a client's frame: decoding takes up to 150 times as much
MAX_REPLY_HEAD_BYTES: Final = 64 * 1024 * 1024  # the descriptions of every entity fit
MAX_FRAME_BYTES: Final = 2 * MAX_BATCH_BYTES  # a full batch with its properties and offsets
ROWS_AS_ROWS: Final = 16  # messages of one send or reply; more are cheaper as columns
ROWS_IN_LOG: Final = 8  # messages of one turn; more are cheaper as columns
PLACED_MESSAGES: Final = 16  # staged one by one in one turn; more are cheaper as columns
ENTRIES_AS_ROWS: Final = 32  # places or ids of one turn in the log; more are cheaper as columns
MAX_OPEN_REQUESTS: Final = 20_000  # of one connection: every receive of a namespace, and more
MAX_UNANSWERED_BYTES: Final = 64 * 1024 * 1024  # a connection with more is not read for a while
MAX_UNREAD_BYTES: Final = 2 * MAX_RECEIVE_BYTES  # of replies: one being sent, and the next
MAX_KEY_REPLY_BYTES: Final = 8 * MAX_RECEIVE_BYTES  # expected or unread, on a key's connections
MAX_REPLY_BYTES: Final = 8 * MAX_KEY_REPLY_BYTES  # of all keys; a tenth is for keys that manage
MAX_KEY_REQUEST_BYTES: Final = 4 * MAX_UNANSWERED_BYTES  # unanswered, of all its connections
MAX_REQUEST_BYTES: Final = 4 * MAX_KEY_REQUEST_BYTES  # of all keys; a tenth is for keys that manage
COUNTED_STEP_BYTES: Final = 16 * 1024  # of a connection: fewer are not added to the sum of its key
MIN_READ_BYTES: Final = 256 * 1024  # a client must read so much, or all, in QUIET_US: 9 KB a second
MAX_INCOMPLETE_BYTES: Final = 256 * 1024 * 1024  # of frames under way, of all connections of a key
AUTHENTICATION_US: Final = 10 * SECOND_US  # to present a token; a client needs milliseconds
MAX_STRANGERS: Final = 256  # connections without a token yet; beyond, the oldest is closed
MAX_STRANGER_BYTES: Final = 32 * 1024 * 1024  # of their unfinished requests; likewise
MAX_READERS: Final = 256  # HTTP connections that have shown a token; beyond, the oldest is closed
MAX_CONNECTIONS: Final = 10_000  # each takes some 4 KB and a descriptor
PRIVATE_CONNECTIONS: Final = 256  # of a private door: one for each worker of Spark, and a few more
MAX_SOCKET_PATH_BYTES: Final = 103  # of a socket in the file system: macOS takes no more, Linux 107
RESERVED_DESCRIPTORS: Final = 256  # for the log, the ledgers and the listening sockets
CONNECTION_SHARE: Final = 0.8  # of the connections that one key, or one address, may take
ACCEPTS_PER_ROUND: Final = 64  # connections accepted before the others are served again
MAX_CONFIG_BYTES: Final = 16 * 1024 * 1024  # some 100,000 entities; reading /dev/zero ends here
LISTEN_BACKLOG: Final = 1024  # connections that wait to be accepted
WRITE_BUFFER_BYTES: Final = 256 * 1024  # of one socket, before its replies are kept back
SNAPSHOT_ENTITIES: Final = 256  # looked at in one go: a few milliseconds
METRICS_AGE_S: Final = 1.0  # a page of metrics is rendered no more often
SLOW_TURN_US: Final = 5_000  # a flush in the loop that takes longer moves to a thread
QUICK_TURN_US: Final = 2_000  # flushes return to the loop when they take no longer
LATENCY_BOUNDS_US: Final = (  # of a histogram: a quick sync takes a millisecond, a try 5 seconds
    *(500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000),
    *(1 * SECOND_US, 2_500_000, 5 * SECOND_US, 10 * SECOND_US),
)
DELIVERY_SLICE_S: Final = 0.005  # how long replies are encoded before the loop reads again
IDLE_CHECK_US: Final = SECOND_US // 2  # a connection that was idle so long may have ended
CONNECT_TIMEOUT_S: Final = 20.0  # of an operation that has more time than that
READ_BYTES: Final = 128 * 1024  # at once from a socket, by a client
LARGE_FRAME_BYTES: Final = 64 * 1024  # from here on a frame is read into memory of its own
READ_PIECE_BYTES: Final = 8 * 1024  # of AMQP, processed at once: 15 ms in the worst frames
READ_STEP_MESSAGES: Final = 128  # of a large batch of AMQP, read at once: 15 ms in the worst case
READ_SLICE_S: Final = 0.01  # of a key in a round of the loop, for the bytes of its AMQP connections
FRAME_GROWTH: Final = 16  # memory of an incomplete large frame, as a multiple of the bytes received
SERVER_READ_BYTES: Final = 128 * 1024  # at once by a server, so that one client delays no other
WRITE_PIECES: Final = 64  # of frames that are written at once; systems take 1024
QUIET_US: Final = 30 * SECOND_US  # of silence, after which the peer is asked for a reply
DOOR_TICK_S: Final = 1.0  # how often a server looks for silent connections and expired tokens
BURST_BYTES: Final = 4 * 1024 * 1024  # read and written; after less, releasing memory saves little
QUIET_TICK_BYTES: Final = 1024 * 1024  # read and written in a tick; after fewer, a burst is over
RELEASE_INTERVAL_US: Final = 60 * SECOND_US  # between releases of free memory, if never quiet
GRACE_S: Final = 2.0  # how long a server that stops waits for clients, and a client for its threads

# AMQP
AMQP_FRAME_BYTES: Final = 64 * 1024  # the largest that peers may send; as in Service Bus
AMQP_WRITTEN_FRAME_BYTES: Final = 1024 * 1024  # the most that we write, whatever a peer allows
MIN_AMQP_FRAME_BYTES: Final = 512  # every peer must take so much, and SASL frames have no more
MAX_AMQP_DEPTH: Final = 32  # nesting of lists and maps: Python's stack holds 1000
MAX_AMQP_ITEMS: Final = 65_536  # of one list, map or array; other implementations take as many
MAX_AMQP_ENTRIES: Final = (
    32_000  # of a map in a sent message: the broker adds some when it delivers
)
MAX_AMQP_WIDTHLESS_ITEMS: Final = 256  # of an array whose elements take no bytes, such as null
MAX_AMQP_SECTIONS: Final = 10_000  # of one message: a batch has one for each message in it
MAX_AMQP_SECTION_BYTES: Final = 256 * 1024  # the most that we decode: values take up to 60 times it
CHECKED_SECTION_BYTES: Final = 64 * 1024  # of native sends, at once: values may take 1 us each
MAX_AMQP_TAG_BYTES: Final = 32  # of a delivery tag, as the specification says
MAX_AMQP_STATE_BYTES: Final = 512  # of a transfer with a state, which is kept until its last frame
MAX_AMQP_SESSIONS: Final = 1024  # of one connection; some SDKs begin one for each link
MAX_AMQP_SESSION_LINKS: Final = 256  # as Service Bus
MAX_AMQP_LINKS: Final = 2048  # of one connection; each takes some 1 KB
MAX_AMQP_KEPT_FRAME_BYTES: Final = 16 * 1024  # of an open, begin or attach; its values are kept
MAX_AMQP_KEPT_VALUES: Final = 256  # of such a frame, nested ones too; a value takes up to 64 bytes
MAX_AMQP_KEPT_BYTES: Final = 2 * 1024 * 1024  # of attaches of one connection
AMQP_INCOMING_WINDOW: Final = 2048  # transfers that a peer may send before it reads
AMQP_OUTGOING_WINDOW: Final = 2048  # named in our frames; the window of the peer is decisive
MAX_AMQP_UNSETTLED: Final = 10_000  # deliveries of one session and direction; some 300 bytes each
MAX_AMQP_PARTIAL_BYTES: Final = 64 * 1024 * 1024  # of unfinished deliveries of one connection
MAX_TOKEN_MESSAGE_BYTES: Final = 64 * 1024  # of a message to $cbs: tokens have a few KB
STRANGER_AMQP_SESSIONS: Final = 32  # of a connection without a token: one, or one for each link
STRANGER_AMQP_LINKS: Final = 16  # of a connection without a token: a pair for tokens, and retries
STRANGER_AMQP_BYTES: Final = 128 * 1024  # of its attaches, unfinished deliveries, and unread bytes
MAX_TOKEN_ANSWERS: Final = 100  # of $cbs that wait for credit; clients ask a few tokens at a time
AMQP_MESSAGE_BYTES: Final = 1024 * 1024  # of one message, where a link sets no other limit
AMQP_OPEN_US: Final = AUTHENTICATION_US  # for protocol headers, SASL and open
AMQP_CLOSE_US: Final = 2 * SECOND_US  # within which a peer must answer a close
AMQP_IDLE_US: Final = 120 * SECOND_US  # how long peers may be silent; SDKs send at most every 30 s
SERVICE_BUS_IDLE_US: Final = 240 * SECOND_US  # announced to SDKs, which send heartbeats late
SERVICE_BUS_CREDIT: Final = 1000  # sends under way on one link
SERVICE_BUS_FETCH_MESSAGES: Final = 1000  # the most that a link takes from the queue at once
SERVICE_BUS_FETCH_BYTES: Final = 4 * 1024 * 1024  # of these messages, which wait for the client
DEV_CERTIFICATE_LIFE: Final = timedelta(days=365)  # clients refuse more than 397 days
CLOCK_SKEW: Final = timedelta(hours=1)  # a new certificate is valid from so long before now
EMULATOR_PORTS: Final = {"port": 5672, "admin_port": 5300}  # of the official emulator
MAX_ADMINISTRATION_BYTES: Final = 512 * 1024  # of one request: a rule with all its values fits
ADMINISTRATION_PAGE: Final = 100  # entities of one page of a list, as Service Bus
IDLE_FRAMES_PER_READ: Final = 16  # empty frames of a websocket: a client needs one ping in a while
MAX_AUTHORIZATION_RULES: Final = 12  # of one entity, as Service Bus
SERVICE_BUS_DEFERRED_REQUESTS: Final = 100  # for whose replies there is no room yet
SERVICE_BUS_ACCEPT_WAIT: Final = timedelta(seconds=65)  # for a session; a client may set another
MIN_AMQP_IDLE_US: Final = 1 * SECOND_US  # a peer that wants heartbeats more often is refused

# Azure Service Bus through its SDK
SERVICE_BUS_PORT: Final = 5671  # AMQP over TLS
EMULATOR_PORT: Final = 5672  # AMQP without TLS, as the emulator of Service Bus has it
AZURE_WORKERS: Final = 32  # commands of one namespace that are carried out side by side
AZURE_WAITERS: Final = 512  # receives that wait at the same time; each has a thread and a link
AZURE_LINKS: Final = 1024  # senders and receivers of one namespace; each has a connection
AZURE_IDLE_S: Final = 60.0  # after which an unused link is closed; the service closes it at 240 s
AZURE_SWEEP_S: Final = 15.0  # between two looks for unused links
AZURE_THREAD_IDLE_S: Final = 30.0  # after which a thread without work ends
AZURE_RECEIVE_MESSAGES: Final = 1000  # the most that one receive requests from the service
AZURE_MESSAGE_LOCKS: Final = 100_000  # locked messages that are settled on the link they came by
AZURE_POLL_S: Final = 0.25  # between two checks whether a waiting receive must end
AZURE_DRAIN_S: Final = 5.0  # for the service to take back credit; the link is closed then
AZURE_KEEP_ALIVE_S: Final = 30  # the longest pause between two frames that a receiver asks for
AZURE_SILENCE_S: Final = 2.0 * AZURE_KEEP_ALIVE_S  # then the connection of a receiver is dead
AZURE_ACCEPT_S: Final = 0.2  # the shortest wait for a session: opening a link takes some time
AZURE_ACCEPT_SLICE_S: Final = 60.0  # the longest wait for a session that is asked of the service
AZURE_ACCEPT_GRACE_S: Final = 1.0  # added to that wait, for the answer of the service
AZURE_REQUEST_S: Final = 30.0  # for a request of management, where the caller sets no limit

# RabbitMQ
RABBITMQ_PORT: Final = 5672  # as registered; 5671 with TLS
RABBITMQ_TLS_PORT: Final = 5671
RABBITMQ_HOSTS: Final = 32  # of one connection string; clusters have 3 to 7
RABBITMQ_NAME_BYTES: Final = 255  # of a queue, an exchange, a header's name or a text property
RABBITMQ_MESSAGE_BYTES: Final = 128 * 1024 * 1024  # RabbitMQ's default limit
RABBITMQ_MAX_DELIVERIES: Final = 2_147_483_646  # RabbitMQ rejects a higher limit
RABBITMQ_MAX_EXPIRATION_MS: Final = 2**32 - 1  # a longer one closes the channel
RABBITMQ_CONNECT_S: Final = 3.0  # per host: two silent hosts leave the third some time of a try
RABBITMQ_HEARTBEAT_S: Final = 10  # a silent connection ends after about twice that
RABBITMQ_RECONNECT_US: Final = SECOND_US // 20  # after the first failure; doubles
RABBITMQ_MAX_RECONNECT_US: Final = 1 * SECOND_US  # a ping each second finds a broker that is back
RABBITMQ_WINDOW: Final = 256  # unconfirmed per entity: past 400 RabbitMQ stops reading all of them
RABBITMQ_WINDOW_BYTES: Final = 16 * 1024 * 1024  # unconfirmed per entity
RABBITMQ_WAITING_MESSAGES: Final = 100_000  # handed over and not published; beyond: ServerBusy
RABBITMQ_SEND_CHANNELS: Final = 500  # entities that are sent to; a connection has 2047 channels
RABBITMQ_FREE_CHANNELS: Final = 100  # queues whose channel stays open for the next receive
RABBITMQ_BLOCKED_S: Final = 30.0  # an alarm of that length is an outage, not a short overload
RABBITMQ_PREFETCH: Final = 2000  # of one receive: deliveries that the broker sends unasked
RABBITMQ_READ_BYTES: Final = 64 * 1024  # of one read of a socket; larger ones cost page faults
RABBITMQ_CACHED_NAMES: Final = 4096  # names of properties whose encoding is remembered
RABBITMQ_ALIKE: Final = 16  # messages of one layout that are read together; fewer one by one
RABBITMQ_NESTED: Final = 32  # tables inside a header that are read; deeper ones become null
RABBITMQ_LOCKS: Final = 100_000  # unsettled messages of a namespace; each takes some 1 KB
RABBITMQ_LOCKED_BYTES: Final = 512 * 1024 * 1024  # of their headers and bodies, for dead letters
RABBITMQ_GATHER_S: Final = 0.005  # after a delivery: for those that come with it
RABBITMQ_KNOWN_GATHER_S: Final = 0.25  # if the broker reported more messages
RABBITMQ_FEW: Final = 4  # messages that are fetched one by one: cheaper than a consumer
RABBITMQ_UNATTENDED_S: Final = 0.02  # if no caller runs the loop for so long, its thread does
RABBITMQ_RECORD_S: Final = 2.0  # for a description to be read; an interrupted create has none

# Timers
MAX_STALE_ALARMS: Final = 1000  # replaced entries of the heap of alarms that may stay in it

# Self-healing
MAX_HEALS: Final = 5  # for the same cause within HEAL_WINDOW_US; then the broker stops
HEAL_WINDOW_US: Final = 600 * SECOND_US
HEAL_BACKOFF_US: Final = SECOND_US // 2  # before the second heal for the same cause; doubles
CAREFUL_US: Final = 30 * SECOND_US  # commands run one by one after a heal, to find a faulty one
MAX_PAUSE_US: Final = 300 * SECOND_US  # of a queue whose timers cannot be carried out
SELF_CHECK_INTERVAL_US: Final = 60 * SECOND_US  # one entity per interval: too cheap to notice
KEPT_DIAGNOSTIC_BUNDLES: Final = 10
RECENT_COMMANDS: Final = 100  # named in a diagnostic bundle

assert MIN_LOCK_DURATION <= DEFAULT_LOCK_DURATION <= MAX_LOCK_DURATION
assert MIN_DUPLICATE_WINDOW <= DEFAULT_DUPLICATE_WINDOW <= MAX_DUPLICATE_WINDOW
assert MAX_MESSAGE_BYTES <= MAX_RECEIVE_BYTES <= MAX_BATCH_BYTES
assert DEFAULT_LEASE_DURATION <= MAX_LEASE_DURATION
assert DEFAULT_SIZE_MEGABYTES <= MAX_SIZE_MEGABYTES
assert DEFAULT_BACKLOG_QUEUES <= MAX_BACKLOG_QUEUES
assert DEFAULT_FAILOVER_INTERVAL <= MAX_FAILOVER_INTERVAL
assert MIN_PING_INTERVAL <= DEFAULT_PING_INTERVAL <= MAX_PING_INTERVAL
assert MIN_RETRY_INTERVAL <= DEFAULT_RETRY_INTERVAL <= MAX_RETRY_INTERVAL
assert MIN_SYPHON_LEASE <= SYPHON_LEASE <= MAX_LEASE_DURATION
assert CARRIED_BYTES <= MAX_RECEIVE_BYTES
assert RANGE_MESSAGES <= MAX_LEASE_MESSAGES
assert TRIAL_MESSAGES < 2**TRIAL_ROUND
assert CARRY_TIMEOUT.total_seconds() >= TRIAL_TIMEOUT_S
assert KNOWN_SENDERS <= KNOWN_SENDERS_IN_ALL
assert KNOWN_GAPS <= KNOWN_INTERVALS
assert MAX_LEASED_RANGES <= MAX_LEASES
assert 2 * (VISIT_S + CARRY_TIMEOUT.total_seconds()) < DEFAULT_LOCK_DURATION.total_seconds()
assert RESERVE_BYTES <= SEGMENT_BYTES
assert MIN_LEDGER_BYTES <= LEDGER_BYTES
assert SLOW_FLUSH_US <= SLOW_COMMIT_US
assert MIN_AMQP_FRAME_BYTES <= AMQP_FRAME_BYTES <= AMQP_WRITTEN_FRAME_BYTES
assert MAX_AMQP_SESSION_LINKS <= MAX_AMQP_LINKS
assert AMQP_MESSAGE_BYTES <= MAX_AMQP_PARTIAL_BYTES
assert 2 * MAX_AMQP_ENTRIES < MAX_AMQP_ITEMS
assert MAX_TOKEN_MESSAGE_BYTES <= STRANGER_AMQP_BYTES <= MAX_STRANGER_BYTES
assert RABBITMQ_PREFETCH <= RABBITMQ_LOCKS
assert RABBITMQ_WINDOW < 400
