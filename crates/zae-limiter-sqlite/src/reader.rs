//! The reader: one thread with one connection, so that no async worker waits for the disk.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, params};
use tokio::sync::oneshot;
use zae_limiter_core::{Bucket, BucketKey, StoreError, Timestamp};

use crate::codec::decode_state;
use crate::error::Failure;
use crate::opened::OpenedFile;
use crate::queue::{EndOfThread, Queue};
use crate::records::optional_time;

/// How long SQLite waits for a lock before the reader checks whether its caller still waits. In WAL
/// mode readers wait only while another process recovers the log.
const BUSY_WAIT: Duration = Duration::from_millis(20);

/// A read for the reader's queue.
pub(crate) trait ReadJob: Send {
    /// Reads and replies. Returns `false` if the file was busy and the caller still waits.
    fn run(&mut self, conn: &Connection, file: &mut OpenedFile) -> bool;
}

struct Job<T, F> {
    read: F,
    reply: Option<oneshot::Sender<Result<T, StoreError>>>,
}

impl<T, F> ReadJob for Job<T, F>
where
    T: Send,
    F: FnMut(&Connection) -> Result<T, Failure> + Send,
{
    fn run(&mut self, conn: &Connection, file: &mut OpenedFile) -> bool {
        let Some(reply) = self.reply.take().filter(|reply| !reply.is_closed()) else {
            return true;
        };
        match in_snapshot(conn, file, &mut self.read) {
            Err(failure) if failure.is_busy() => {
                self.reply = Some(reply);
                false
            }
            read => {
                let read = read.map_err(|failure| Arc::new(failure).to_store_error(file.path()));
                // The caller may have left meanwhile.
                let _ = reply.send(read);
                true
            }
        }
    }
}

/// A job for the reader, and the receiver of its reply.
pub(crate) fn read_job<T: Send + 'static>(
    read: impl FnMut(&Connection) -> Result<T, Failure> + Send + 'static,
) -> (Box<dyn ReadJob>, oneshot::Receiver<Result<T, StoreError>>) {
    let (reply, receiver) = oneshot::channel();
    (Box::new(Job { read, reply: Some(reply) }), receiver)
}

/// Runs a read in a transaction, so that it sees the file as of one moment.
fn in_snapshot<T>(
    conn: &Connection,
    file: &mut OpenedFile,
    read: &mut impl FnMut(&Connection) -> Result<T, Failure>,
) -> Result<T, Failure> {
    conn.prepare_cached("BEGIN")?.execute([])?;
    let result = file.check(conn).and_then(|_| read(conn));
    if !conn.is_autocommit() {
        conn.prepare_cached("ROLLBACK")?.execute([])?;
    }
    result
}

/// Runs jobs until the queue is closed and empty.
pub(crate) fn run(mut file: OpenedFile, queue: Arc<Queue<Box<dyn ReadJob>>>, conn: Connection) {
    let _end = EndOfThread(&queue);
    let mut pending: VecDeque<Box<dyn ReadJob>> = VecDeque::new();
    if let Err(failure) = conn.busy_timeout(BUSY_WAIT) {
        tracing::warn!(%failure, "could not set the busy timeout of the reader");
    }
    while queue.wait() {
        queue.take(&mut pending);
        for mut job in pending.drain(..) {
            while !job.run(&conn, &mut file) {
                if queue.is_closed() {
                    return;
                }
            }
        }
    }
}

/// Reads a bucket. `None` if it is absent or has expired.
pub(crate) fn peek(
    conn: &Connection,
    key: &BucketKey,
    now: Timestamp,
) -> Result<Option<Bucket>, Failure> {
    let sql = "SELECT state, expires_at FROM bucket \
               WHERE ns = ?1 AND entity = ?2 AND resource = ?3";
    let mut statement = conn.prepare_cached(sql)?;
    let columns = params![key.namespace.as_str(), key.entity.as_str(), key.resource.as_str()];
    let mut rows = statement.query(columns)?;
    let Some(row) = rows.next()? else { return Ok(None) };
    let state = row.get_ref(0)?.as_blob().map_err(rusqlite::Error::from)?;
    let state = decode_state(state, optional_time(row, 1)?, None)?;
    Ok((!state.is_expired(now)).then_some(state.bucket))
}
