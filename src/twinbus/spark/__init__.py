"""Starting and sharing Spark: its session, its JVM and Java, and one connection per process."""
