//! The sweeper: deletes expired buckets, usage records and audit events, a few rows at a time.
//!
//! An index on the expiry would change with every acquire. Instead the sweeper walks through the
//! tables in the order of their keys, and starts over at the end.

use rusqlite::types::Value;
use rusqlite::{Row, params_from_iter};
use zae_limiter_core::{BucketKey, Key, Timestamp, UsageKey};

use crate::error::Failure;
use crate::ledger::{Ledger, bucket_key};
use crate::records;

/// The most rows that one step reads.
pub(crate) const SWEEP_MAX: usize = 100;

/// One hour: how long after its expiry a row stays, because the clocks of processes differ.
pub(crate) const SWEEP_DELAY_MS: i64 = 3_600_000;

/// A walk through one table in the order of its key.
struct Walk {
    sql: &'static str,
    /// How many columns the key has. They come first, then the expiry.
    columns: usize,
    key: fn(&Row<'_>) -> Result<Key, Failure>,
}

const WALKS: [Walk; 3] = [
    Walk {
        sql: "SELECT ns, entity, resource, expires_at FROM bucket \
              WHERE (ns, entity, resource) > (?1, ?2, ?3) ORDER BY ns, entity, resource LIMIT ?4",
        columns: 3,
        key: |row| Ok(Key::Bucket(bucket_key(row)?)),
    },
    Walk {
        sql: "SELECT ns, entity, window, resource, start, expires_at FROM usage \
              WHERE (ns, entity, window, resource, start) > (?1, ?2, ?3, ?4, ?5) \
              ORDER BY ns, entity, window, resource, start LIMIT ?6",
        columns: 5,
        key: |row| {
            Ok(Key::Usage(UsageKey {
                namespace: records::name(row, 0)?,
                entity: records::name(row, 1)?,
                window: records::window(row, 2)?,
                resource: records::name(row, 3)?,
                start: records::time(row, 4)?,
            }))
        },
    },
    Walk {
        sql: "SELECT ns, subject, id, expires_at FROM audit \
              WHERE (ns, subject, id) > (?1, ?2, ?3) ORDER BY ns, subject, id LIMIT ?4",
        columns: 3,
        key: |row| Ok(Key::Audit(records::name(row, 0)?, records::name(row, 1)?, row.get(2)?)),
    },
];

/// The sweeper's position: the table, and the last key that it has read there.
#[derive(Debug, Default)]
pub(crate) struct Sweeper {
    walk: usize,
    after: Option<Vec<Value>>,
}

impl Sweeper {
    /// Does one step, within a transaction.
    pub(crate) fn step(&mut self, ledger: &mut Ledger, now: Timestamp) -> Result<(), Failure> {
        let walk = &WALKS[self.walk];
        let limit = now.as_millis().saturating_sub(SWEEP_DELAY_MS);
        let start = || vec![Value::Text(String::new()); walk.columns];
        let mut values = self.after.take().unwrap_or_else(start);
        values.push(Value::Integer(SWEEP_MAX as i64));
        let mut expired = Vec::new();
        let mut seen = 0;
        {
            let mut statement = ledger.conn.prepare_cached(walk.sql)?;
            let mut rows = statement.query(params_from_iter(values))?;
            while let Some(row) = rows.next()? {
                seen += 1;
                if seen == SWEEP_MAX {
                    let columns = (0..walk.columns).map(|at| row.get(at));
                    self.after = Some(columns.collect::<Result<_, _>>()?);
                }
                let expiry: Option<i64> = row.get(walk.columns)?;
                // The sweeper skips damaged rows: the next call that reads one reports it.
                if expiry.is_some_and(|expiry| expiry <= limit)
                    && let Ok(key) = (walk.key)(row)
                {
                    expired.push(key);
                }
            }
        }
        if seen < SWEEP_MAX {
            self.walk = (self.walk + 1) % WALKS.len();
        }
        for key in &expired {
            if let Key::Bucket(key) = key {
                book_usage(ledger, key)?;
            }
        }
        ledger.delete(&expired)
    }
}

/// Books a bucket's usage before the bucket is deleted.
fn book_usage(ledger: &mut Ledger, key: &BucketKey) -> Result<(), Failure> {
    let Ok(at) = ledger.states.find(&ledger.conn, key, None) else { return Ok(()) };
    let booking = ledger.states.get(at).cloned().and_then(|mut state| state.take_booking());
    booking.map_or(Ok(()), |booking| ledger.book(key, &booking))
}
