//! The writer's cache of bucket states, one entry per bucket.
//!
//! Entries outlive their transaction as long as no other connection writes to the file. Outside of
//! a transaction an entry equals its row.

use std::hash::BuildHasher;

use hashbrown::HashTable;
use rusqlite::{Connection, params};
use zae_limiter_core::bucket_state::BucketState;
use zae_limiter_core::{BucketKey, Target};

use crate::codec::{decode_state, encode_state};
use crate::error::Failure;
use crate::records::{millis, optional_time};

/// The most bucket states that are cached between transactions: about 250 MB, and only where that
/// many buckets are busy. Reading one again costs more than everything else in an acquire.
const STATES_MAX: usize = 1 << 20;

/// The index of a slot in [`BucketStates`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct At(usize);

#[derive(Debug)]
struct Slot {
    key: BucketKey,
    state: Option<BucketState>,
    // The number of its row. `None` means that the row has to be inserted.
    row: Option<i64>,
    is_dirty: bool,
}

/// The cache; see the module.
#[derive(Debug, Default)]
pub(crate) struct BucketStates {
    // Indexes into `slots`, hashed by key.
    places: HashTable<u32>,
    hashing: foldhash::fast::RandomState,
    slots: Vec<Slot>,
    dirty: Vec<usize>,
    // Reused for every encoding.
    encoded: Vec<u8>,
}

impl BucketStates {
    /// Empties the cache, for example after a transaction that was rolled back.
    pub(crate) fn clear(&mut self) {
        self.places.clear();
        self.slots.clear();
        self.dirty.clear();
    }

    /// Starts a transaction: empties the cache if it is stale or full.
    pub(crate) fn begin(&mut self, is_stale: bool) {
        if is_stale || self.slots.len() >= STATES_MAX {
            self.clear();
        }
    }

    /// Finds a bucket state in the cache, or loads it from the file.
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
                let expected = target.map(Target::limits);
                let state = decode_state(state, optional_time(row, 1)?, expected)?;
                (Some(row.get(0)?), Some(state))
            }
            None => (None, None),
        };
        let at = self.slots.len();
        self.slots.push(Slot { key: key.clone(), state, row, is_dirty: false });
        let place = u32::try_from(at).expect("STATES_MAX and one batch are far below 2^32");
        let rehash = |&at: &u32| self.hashing.hash_one(&self.slots[at as usize].key);
        self.places.insert_unique(hash, place, rehash);
        Ok(At(at))
    }

    fn place(&self, hash: u64, key: &BucketKey) -> Option<usize> {
        let found = self.places.find(hash, |&at| self.slots[at as usize].key == *key);
        found.map(|&at| at as usize)
    }

    /// The bucket state. `None` if the bucket does not exist.
    pub(crate) fn get(&self, at: At) -> Option<&BucketState> {
        self.slots[at.0].state.as_ref()
    }

    /// Replaces the bucket state. [`store`](Self::store) writes it.
    pub(crate) fn set(&mut self, at: At, state: BucketState) {
        let slot = &mut self.slots[at.0];
        slot.state = Some(state);
        if !slot.is_dirty {
            slot.is_dirty = true;
            self.dirty.push(at.0);
        }
    }

    /// Removes a bucket state whose row has been deleted.
    pub(crate) fn remove(&mut self, key: &BucketKey) {
        if let Some(at) = self.place(self.hashing.hash_one(key), key) {
            let slot = &mut self.slots[at];
            slot.state = None;
            slot.row = None;
        }
    }

    /// Writes all changed bucket states.
    pub(crate) fn store(&mut self, conn: &Connection) -> Result<(), Failure> {
        if self.dirty.is_empty() {
            return Ok(());
        }
        // In the order of the rows, so that neighbours share a cached page.
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

/// Inserts a row and returns its number.
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
