//! The accounts that the writer has loaded, each once, however many plans touch it.
//!
//! An account stays here after its transaction for as long as no other connection writes to the
//! file. Then the account and its row are the same, except within a transaction.

use std::collections::HashMap;

use rusqlite::{Connection, params};
use zae_limiter_core::account::Account;
use zae_limiter_core::{BucketKey, Target};

use crate::codec::{decode_account, encode_account};
use crate::error::Failure;
use crate::records::{millis, optional_time};

/// The most accounts that are kept from one transaction to the next: about 40 MB.
const ACCOUNTS_MAX: usize = 131_072;

/// Where an account stands in [`Accounts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct At(usize);

#[derive(Debug)]
struct Slot {
    key: BucketKey,
    account: Option<Account>,
    // Whether there is a row, which is then updated and not inserted.
    is_stored: bool,
    is_dirty: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    places: HashMap<BucketKey, usize, foldhash::fast::RandomState>,
    slots: Vec<Slot>,
    dirty: Vec<usize>,
    // Changes when another connection has written.
    data_version: Option<i64>,
    encoded: Vec<u8>,
}

impl Accounts {
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
        if self.data_version != Some(version) || self.slots.len() >= ACCOUNTS_MAX {
            self.clear();
        }
        self.data_version = Some(version);
        Ok(others_wrote)
    }

    /// Finds an account, in memory or in the file.
    pub(crate) fn find(
        &mut self,
        conn: &Connection,
        key: &BucketKey,
        target: Option<&Target>,
    ) -> Result<At, Failure> {
        if let Some(&at) = self.places.get(key) {
            return Ok(At(at));
        }
        let sql = "SELECT state, expires_at FROM bucket \
                   WHERE ns = ?1 AND entity = ?2 AND resource = ?3";
        let mut statement = conn.prepare_cached(sql)?;
        let columns = params![key.namespace.as_str(), key.entity.as_str(), key.resource.as_str()];
        let mut rows = statement.query(columns)?;
        let account = match rows.next()? {
            Some(row) => {
                let state = row.get_ref(0)?.as_blob().map_err(rusqlite::Error::from)?;
                let known = target.map(Target::limits);
                Some(decode_account(state, optional_time(row, 1)?, known)?)
            }
            None => None,
        };
        let at = self.slots.len();
        let is_stored = account.is_some();
        self.slots.push(Slot { key: key.clone(), account, is_stored, is_dirty: false });
        self.places.insert(key.clone(), at);
        Ok(At(at))
    }

    /// The account; there may be none.
    pub(crate) fn get(&self, at: At) -> Option<&Account> {
        self.slots[at.0].account.as_ref()
    }

    /// Replaces the account. It is written at the end of the transaction.
    pub(crate) fn set(&mut self, at: At, account: Account) {
        let slot = &mut self.slots[at.0];
        slot.account = Some(account);
        if !slot.is_dirty {
            slot.is_dirty = true;
            self.dirty.push(at.0);
        }
    }

    /// Forgets an account whose row has been deleted, or will not be written.
    pub(crate) fn remove(&mut self, key: &BucketKey) {
        if let Some(&at) = self.places.get(key) {
            let slot = &mut self.slots[at];
            slot.account = None;
            slot.is_stored = false;
        }
    }

    /// Writes what was changed.
    pub(crate) fn store(&mut self, conn: &Connection) -> Result<(), Failure> {
        // In the order of the file, neighbours find their page at hand.
        if self.dirty.len() > 1 {
            let slots = &self.slots;
            self.dirty.sort_unstable_by(|&a, &b| slots[a].key.cmp(&slots[b].key));
        }
        let mut dirty = std::mem::take(&mut self.dirty);
        for at in dirty.drain(..) {
            let slot = &mut self.slots[at];
            slot.is_dirty = false;
            let Some(account) = &slot.account else { continue };
            encode_account(account, &mut self.encoded);
            let sql = if slot.is_stored {
                "UPDATE bucket SET expires_at = ?4, state = ?5 \
                 WHERE ns = ?1 AND entity = ?2 AND resource = ?3"
            } else {
                "INSERT INTO bucket (ns, entity, resource, expires_at, state) \
                 VALUES (?1, ?2, ?3, ?4, ?5)"
            };
            conn.prepare_cached(sql)?.execute(params![
                slot.key.namespace.as_str(),
                slot.key.entity.as_str(),
                slot.key.resource.as_str(),
                millis(account.expires_at),
                self.encoded,
            ])?;
            slot.is_stored = true;
        }
        self.dirty = dirty;
        Ok(())
    }
}
