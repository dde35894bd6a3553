//! A secondary index, which lags behind the table.

use std::collections::BTreeMap;

use zae_limiter_schema::{Index, Item, ItemKey, Value, item_size};

/// The attributes that an index has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projection {
    /// All of them.
    All,
    /// Keys only.
    Keys,
}

/// The position of an entry: the index's keys, then the table's.
pub(crate) type Place = (String, String, ItemKey);

#[derive(Debug)]
pub(crate) struct IndexView {
    index: Index,
    projection: Projection,
    /// The entries that a query sees.
    entries: BTreeMap<Place, Item>,
    /// Changes that a query will see later, by their time.
    pending: BTreeMap<(u64, u64), Change>,
    /// The time of the last change of each item, so that they arrive in order.
    last_due: BTreeMap<ItemKey, u64>,
    next: u64,
}

#[derive(Debug)]
struct Change {
    removed: Option<Place>,
    added: Option<(Place, Item)>,
}

impl IndexView {
    pub(crate) fn new(index: Index, projection: Projection) -> Self {
        Self {
            index,
            projection,
            entries: BTreeMap::new(),
            pending: BTreeMap::new(),
            last_due: BTreeMap::new(),
            next: 0,
        }
    }

    fn entry(&self, key: &ItemKey, item: Option<&Item>) -> Option<(Place, Item)> {
        let item = item?;
        let (pk, sk) = (item.get(self.index.pk())?.as_str()?, item.get(self.index.sk())?.as_str()?);
        let shown = match self.projection {
            Projection::All => item.clone(),
            Projection::Keys => self.key_of(pk, sk, key),
        };
        Some(((pk.to_owned(), sk.to_owned(), key.clone()), shown))
    }

    /// The key of an entry, after which a next page starts.
    pub(crate) fn key_of(&self, pk: &str, sk: &str, key: &ItemKey) -> Item {
        let text = |name: &str, text: &str| (name.to_owned(), Value::text(text));
        Item::from([
            text(self.index.pk(), pk),
            text(self.index.sk(), sk),
            text("PK", &key.pk),
            text("SK", &key.sk),
        ])
    }

    /// The write units of a change in this index, by partition.
    pub(crate) fn cost(
        &self,
        key: &ItemKey,
        old: Option<&Item>,
        new: Option<&Item>,
    ) -> Vec<(String, f64)> {
        let units = |item: &Item| super::write_units(item_size(item));
        match (self.entry(key, old), self.entry(key, new)) {
            (None, None) => Vec::new(),
            (Some((place, item)), None) | (None, Some((place, item))) => {
                vec![(place.0, units(&item))]
            }
            (Some((old_place, old)), Some((place, new))) if old_place == place => {
                if old == new {
                    Vec::new()
                } else {
                    vec![(place.0, units(&old).max(units(&new)))]
                }
            }
            (Some((old_place, old)), Some((place, new))) => {
                vec![(old_place.0, units(&old)), (place.0, units(&new))]
            }
        }
    }

    pub(crate) fn change(
        &mut self,
        key: &ItemKey,
        old: Option<&Item>,
        new: Option<&Item>,
        due_us: u64,
    ) {
        let (removed, added) = (self.entry(key, old).map(|(place, _)| place), self.entry(key, new));
        if removed.is_none() && added.is_none() {
            return;
        }
        let last = self.last_due.entry(key.clone()).or_default();
        *last = due_us.max(*last);
        self.pending.insert((*last, self.next), Change { removed, added });
        self.next += 1;
    }

    /// The entries of a partition that a query sees now, in order.
    pub(crate) fn partition(
        &mut self,
        pk: &str,
        now_us: u64,
    ) -> impl DoubleEndedIterator<Item = (&Place, &Item)> {
        while let Some(first) = self.pending.first_entry()
            && first.key().0 <= now_us
        {
            let Change { removed, added } = first.remove();
            removed.map(|place| self.entries.remove(&place));
            added.map(|(place, item)| self.entries.insert(place, item));
        }
        let from = (pk.to_owned(), String::new(), ItemKey::new("", ""));
        let pk = pk.to_owned();
        let rest: Vec<_> = self.entries.range(from..).take_while(|(at, _)| at.0 == pk).collect();
        rest.into_iter()
    }
}
