//! The bucket states that the writer has loaded, each once, however many plans touch it.
//!
//! A bucket state stays here after its transaction for as long as no other connection writes to the
//! file. Then the bucket state and its row are the same, except within a transaction.

use std::hash::BuildHasher;

use hashbrown::HashTable;
use rusqlite::{Connection, params};
use zae_limiter_core::bucket_state::BucketState;
use zae_limiter_core::{BucketKey, Target};

use crate::codec::{decode_state, encode_state};
use crate::error::Failure;
use crate::records::{millis, optional_time};

/// The most bucket states that are kept from one transaction to the next: about 250 MB, and only where
/// that many buckets are busy. Reading one again costs more than everything else in an acquire.
const STATES_MAX: usize = 1 << 20;

/// Where a bucket state stands in [`Bucket states`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct At(usize);

#[derive(Debug)]
struct Slot {
    key: BucketKey,
    state: Option<BucketState>,
    // The number of its row, which is then updated and not inserted.
    row: Option<i64>,
    is_dirty: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct BucketStates {
    // Where the bucket states stand, found by their keys.
    places: HashTable<u32>,
    hashing: foldhash::fast::RandomState,
    slots: Vec<Slot>,
    dirty: Vec<usize>,
    // Changes when another connection has written.
    data_version: Option<i64>,
    encoded: Vec<u8>,
}

impl BucketStates {
    /// Forgets everything, after a transaction that did not come about.
    pub(crate) fn clear(&mut self) {
        self.places.clear();
        self.slots.clear();
        self.dirty.clear();
    }

    /// At the start of a transaction: forgets what may be out of date. Says whether others have
    /// written since the last one.
    pub(crate) fn begin(&mut self, conn: &Connection) -> Result<bool, Failure> {
        let version = conn
            .prepare_cached("PRAGMA data_version")?
            .query_row([], |row| row.get::<_, i64>(0))?;
        let others_wrote = self.data_version.is_some_and(|last| last != version);
        if self.data_version != Some(version) || self.slots.len() >= STATES_MAX {
            self.clear();
        }
        self.data_version = Some(version);
        Ok(others_wrote)
    }

    /// Finds a bucket state, in memory or in the file.
    pub(crate) fn find(
        &mut self,
        conn: &Connection,
        key: &BucketKey,
        target: Option<&Target>,
    ) -> Result<At, Failure> {
        let hash = self.hashing.hash_one(key);
        if let Some(at) = self.place(hash, key) {
            return Ok(At(at));
        }
        let sql = "SELECT number, expires_at, state FROM bucket \
                   WHERE ns = ?1 AND entity = ?2 AND resource = ?3";
        let mut statement = conn.prepare_cached(sql)?;
        let columns = params![key.namespace.as_str(), key.entity.as_str(), key.resource.as_str()];
        let mut rows = statement.query(columns)?;
        let (row, state) = match rows.next()? {
            Some(row) => {
                let state = row.get_ref(2)?.as_blob().map_err(rusqlite::Error::from)?;
                let known = target.map(Target::limits);
                let state = decode_state(state, optional_time(row, 1)?, known)?;
                (Some(row.get(0)?), Some(state))
            }
            None => (None, None),
        };
        let at = self.slots.len();
        self.slots.push(Slot { key: key.clone(), state, row, is_dirty: false });
        let place = u32::try_from(at).expect("a transaction adds few to the most that are kept");
        let rehash = |&at: &u32| self.hashing.hash_one(&self.slots[at as usize].key);
        self.places.insert_unique(hash, place, rehash);
        Ok(At(at))
    }

    fn place(&self, hash: u64, key: &BucketKey) -> Option<usize> {
        let found = self.places.find(hash, |&at| self.slots[at as usize].key == *key);
        found.map(|&at| at as usize)
    }

    /// The bucket state; there may be none.
    pub(crate) fn get(&self, at: At) -> Option<&BucketState> {
        self.slots[at.0].state.as_ref()
    }

    /// Replaces the bucket state. It is written at the end of the transaction.
    pub(crate) fn set(&mut self, at: At, state: BucketState) {
        let slot = &mut self.slots[at.0];
        slot.state = Some(state);
        if !slot.is_dirty {
            slot.is_dirty = true;
            self.dirty.push(at.0);
        }
    }

    /// Forgets a bucket state whose row has been deleted, or will not be written.
    pub(crate) fn remove(&mut self, key: &BucketKey) {
        if let Some(at) = self.place(self.hashing.hash_one(key), key) {
            let slot = &mut self.slots[at];
            slot.state = None;
            slot.row = None;
        }
    }

    /// Writes what was changed.
    pub(crate) fn store(&mut self, conn: &Connection) -> Result<(), Failure> {
        if self.dirty.is_empty() {
            return Ok(());
        }
        // In the order of the file, neighbours find their page at hand.
        let slots = &mut self.slots;
        self.dirty.sort_unstable_by_key(|&at| slots[at].row);
        let mut update =
            conn.prepare_cached("UPDATE bucket SET expires_at = ?2, state = ?3 WHERE number = ?1")?;
        for at in std::mem::take(&mut self.dirty) {
            let slot = &mut slots[at];
            slot.is_dirty = false;
            let Some(state) = &slot.state else { continue };
            encode_state(state, &mut self.encoded);
            let expires_at = millis(state.expires_at);
            match slot.row {
                Some(row) => {
                    update.execute(params![row, expires_at, self.encoded])?;
                }
                None => slot.row = Some(insert(conn, &slot.key, expires_at, &self.encoded)?),
            }
        }
        Ok(())
    }
}

/// Writes a new row and gives its number.
fn insert(
    conn: &Connection,
    key: &BucketKey,
    expires_at: Option<i64>,
    state: &[u8],
) -> Result<i64, Failure> {
    let sql = "INSERT INTO bucket (ns, entity, resource, expires_at, state) \
               VALUES (?1, ?2, ?3, ?4, ?5)";
    let (ns, entity, resource) = (&key.namespace, &key.entity, &key.resource);
    let columns = params![ns.as_str(), entity.as_str(), resource.as_str(), expires_at, state];
    Ok(conn.prepare_cached(sql)?.insert(columns)?)
}
