//! The reader: one thread, one connection, so that no async worker waits for the disk.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, params};
use tokio::sync::oneshot;
use zae_limiter_core::{Bucket, BucketKey, StoreError, Timestamp};

use crate::codec::decode_state;
use crate::error::Failure;
use crate::queue::{EndOfThread, Queue};
use crate::records::optional_time;

/// How long SQLite waits for a lock before the reader looks whether its caller is still there.
/// Readers wait for nobody in WAL mode, except while another process repairs the log.
const BUSY_WAIT: Duration = Duration::from_millis(20);

/// A question to the file.
pub(crate) trait Question: Send {
    /// Reads and answers. `false` when the file was busy and the caller still waits.
    fn ask(&mut self, conn: &Connection, file: &std::path::Path) -> bool;
}

struct Asked<T, F> {
    read: F,
    reply: Option<oneshot::Sender<Result<T, StoreError>>>,
}

impl<T, F> Question for Asked<T, F>
where
    T: Send,
    F: FnMut(&Connection) -> Result<T, Failure> + Send,
{
    fn ask(&mut self, conn: &Connection, file: &std::path::Path) -> bool {
        let Some(reply) = self.reply.take().filter(|reply| !reply.is_closed()) else {
            return true;
        };
        match in_snapshot(conn, &mut self.read) {
            Err(failure) if failure.is_busy() => {
                self.reply = Some(reply);
                false
            }
            // A caller that has gone away misses nothing.
            read => {
                let _ = reply.send(read.map_err(|failure| Arc::new(failure).told(file)));
                true
            }
        }
    }
}

/// A question and where its answer will be.
pub(crate) fn question<T: Send + 'static>(
    read: impl FnMut(&Connection) -> Result<T, Failure> + Send + 'static,
) -> (Box<dyn Question>, oneshot::Receiver<Result<T, StoreError>>) {
    let (reply, answer) = oneshot::channel();
    (Box::new(Asked { read, reply: Some(reply) }), answer)
}

/// Reads everything as of one moment.
fn in_snapshot<T>(
    conn: &Connection,
    read: &mut impl FnMut(&Connection) -> Result<T, Failure>,
) -> Result<T, Failure> {
    conn.prepare_cached("BEGIN")?.execute([])?;
    let answer = read(conn);
    if !conn.is_autocommit() {
        conn.prepare_cached("ROLLBACK")?.execute([])?;
    }
    answer
}

/// Answers questions until the queue is closed and empty.
pub(crate) fn run(file: PathBuf, queue: Arc<Queue<Box<dyn Question>>>, conn: Connection) {
    let _end = EndOfThread(&queue);
    let mut waiting: VecDeque<Box<dyn Question>> = VecDeque::new();
    if let Err(failure) = conn.busy_timeout(BUSY_WAIT) {
        tracing::warn!(%failure, "the reader waits longer than it should");
    }
    while queue.wait() {
        queue.take(&mut waiting);
        for mut question in waiting.drain(..) {
            while !question.ask(&conn, &file) {
                if queue.is_closed() {
                    return;
                }
            }
        }
    }
}

/// Reads a bucket, unless it is absent or has expired.
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
