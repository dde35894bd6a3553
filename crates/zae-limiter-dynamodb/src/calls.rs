//! Calls to the table, each metered.

use std::collections::{BTreeSet, HashMap};

use zae_limiter_schema::{
    Change, Consistency, Item, ItemKey, Query, QueryAnswer, TableErrorKind, Transacted, Update,
    Updated,
};

use crate::Shared;
use crate::error::Trouble;

/// How often a transaction is sent while others are under way on the same items. Nothing waits in
/// between but the round trip itself: such transactions take milliseconds.
const COLLISIONS_MAX: u32 = 5;

/// The key of an item; every index holds it.
pub(crate) fn key_of(item: &Item) -> Option<ItemKey> {
    let text = |name| item.get(name).and_then(|value| value.as_str());
    Some(ItemKey::new(text("PK")?, text("SK")?))
}

impl Shared {
    /// Reads items as they are now; absent ones are missing.
    pub(crate) async fn read_items(
        &self,
        keys: impl IntoIterator<Item = ItemKey>,
    ) -> Result<HashMap<ItemKey, Item>, Trouble> {
        let keys: BTreeSet<ItemKey> = keys.into_iter().collect();
        let keys: Vec<ItemKey> = keys.into_iter().collect();
        if keys.is_empty() {
            return Ok(HashMap::new());
        }
        let read = self.table.read(&keys, Consistency::Strong).await;
        let read = read.inspect_err(|_| self.meter.count_unanswered())?;
        self.meter.count(read.consumed);
        let found = read.items.into_iter().filter_map(|item| Some((key_of(&item)?, item)));
        Ok(found.collect())
    }

    pub(crate) async fn query(&self, query: &Query) -> Result<QueryAnswer, Trouble> {
        let answer = self.table.query(query).await;
        let answer = answer.inspect_err(|_| self.meter.count_unanswered())?;
        self.meter.count(answer.consumed);
        Ok(answer)
    }

    pub(crate) async fn update(&self, update: &Update) -> Result<Updated, Trouble> {
        let updated = self.table.update(update).await;
        let updated = updated.inspect_err(|_| self.meter.count_unanswered())?;
        let (Updated::Done(_, consumed) | Updated::Unmet(_, consumed)) = &updated;
        self.meter.count(*consumed);
        Ok(updated)
    }

    pub(crate) async fn transact(&self, changes: &[Change]) -> Result<Transacted, Trouble> {
        let mut sent = 0;
        loop {
            sent += 1;
            match self.table.transact(changes).await {
                Ok(transacted) => {
                    let (Transacted::Done(consumed) | Transacted::Unmet(_, consumed)) = &transacted;
                    self.meter.count(*consumed);
                    return Ok(transacted);
                }
                Err(error) => {
                    self.meter.count_unanswered();
                    if error.kind != TableErrorKind::Conflict || sent == COLLISIONS_MAX {
                        return Err(error.into());
                    }
                }
            }
        }
    }

    /// Deletes items, whether they are there or not.
    pub(crate) async fn remove(&self, keys: &[ItemKey]) -> Result<(), Trouble> {
        if keys.is_empty() {
            return Ok(());
        }
        let consumed = self.table.delete(keys).await;
        let consumed = consumed.inspect_err(|_| self.meter.count_unanswered())?;
        self.meter.count(consumed);
        Ok(())
    }
}
