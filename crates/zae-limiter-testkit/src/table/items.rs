//! The items, and the effect and cost of each call on them.

use std::collections::{BTreeMap, BTreeSet};

use zae_limiter_schema::{
    BatchRead, Change, Consistency, Consumed, Index, Item, ItemKey, PAGE_ITEMS_MAX, Query,
    QueryOutput, Range, Step, TableError, TableErrorKind, Transacted, Update, Updated, Value,
    item_size,
};

use super::expression::{all_hold, check, rejected, updated};
use super::index::{IndexView, Projection};
use super::{ITEM_MAX, Load, PAGE_MAX, READ_UNIT, Site, Totals, units, write_units};

/// The most changes in a transaction.
const TRANSACTION_MAX: usize = 100;
/// The longest partition and sort keys in bytes.
const PK_MAX: usize = 2_048;
const SK_MAX: usize = 1_024;

#[derive(Debug)]
pub(crate) struct Items {
    items: BTreeMap<ItemKey, Item>,
    /// Each item before its last change, and the time of that change: for stale reads.
    before: BTreeMap<ItemKey, (Option<Item>, u64)>,
    indexes: [IndexView; 4],
    load: Load,
    /// Hot partitions of the table, which throttle writes, and until when.
    hot_until_us: BTreeMap<String, u64>,
    pub(crate) totals: Totals,
}

impl Default for Items {
    fn default() -> Self {
        let indexes = Index::ALL.map(|index| {
            let all = index == Index::Parent;
            IndexView::new(index, if all { Projection::All } else { Projection::Keys })
        });
        Self {
            items: BTreeMap::new(),
            before: BTreeMap::new(),
            indexes,
            load: Load::new(),
            hot_until_us: BTreeMap::new(),
            totals: Totals::default(),
        }
    }
}

impl Items {
    pub(crate) fn set_projection(&mut self, index: Index, projection: Projection) {
        assert!(self.items.is_empty(), "a projection can only be set while the table is empty");
        self.indexes[place(index)] = IndexView::new(index, projection);
    }

    /// Makes a partition hot until then.
    pub(super) fn heat(&mut self, partition: &str, until_us: u64) {
        self.hot_until_us.insert(partition.to_owned(), until_us);
    }

    /// Makes all partitions accept writes again.
    pub(crate) fn cool(&mut self) {
        self.hot_until_us.clear();
    }

    pub(crate) fn get(&self, key: &ItemKey) -> Option<&Item> {
        self.items.get(key)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Item> {
        self.items.values()
    }

    /// The keys of items whose `ttl` is before a time.
    pub(crate) fn expired(&self, before_s: i64) -> Vec<ItemKey> {
        let ttl = |item: &Item| item.get("ttl").and_then(Value::as_i64);
        let expired = self.items.iter().filter(|(_, item)| ttl(item).is_some_and(|t| t < before_s));
        expired.map(|(key, _)| key.clone()).collect()
    }

    pub(crate) fn remove(&mut self, key: &ItemKey, now_us: u64) -> Option<Item> {
        let old = self.items.get(key).cloned();
        self.put(key, old.as_ref(), None, now_us, 0);
        old
    }

    fn put(
        &mut self,
        key: &ItemKey,
        old: Option<&Item>,
        new: Option<Item>,
        now_us: u64,
        lag_us: u64,
    ) {
        for index in &mut self.indexes {
            index.change(key, old, new.as_ref(), now_us + lag_us);
        }
        self.before.insert(key.clone(), (old.cloned(), now_us));
        match new {
            Some(new) => self.items.insert(key.clone(), new),
            None => self.items.remove(key),
        };
    }
}

fn place(index: Index) -> usize {
    Index::ALL.iter().position(|one| *one == index).expect("one of all")
}

/// The cost of a write: the table's units, and those of each index by partition.
struct Bill {
    table: f64,
    indexes: Vec<(Index, String, f64)>,
}

impl Bill {
    fn of(items: &Items, key: &ItemKey, old: Option<&Item>, new: Option<&Item>) -> Self {
        let size = |item: Option<&Item>| item.map_or(0, item_size);
        let mut indexes = Vec::new();
        for (index, view) in Index::ALL.into_iter().zip(&items.indexes) {
            let cost = view.cost(key, old, new);
            indexes.extend(cost.into_iter().map(|(partition, units)| (index, partition, units)));
        }
        Self { table: write_units(size(old).max(size(new))), indexes }
    }

    fn times(mut self, factor: f64) -> Self {
        self.table *= factor;
        self.indexes.iter_mut().for_each(|(_, _, units)| *units *= factor);
        self
    }

    fn total(&self) -> f64 {
        self.table + self.indexes.iter().map(|(_, _, units)| units).sum::<f64>()
    }
}

impl Site<'_> {
    /// Counts a write. Fails if a partition is hot or has no capacity left in this second.
    fn count_write(&mut self, key: &ItemKey, bill: &Bill) -> Result<(), TableError> {
        let second = self.now_us / 1_000_000;
        if let Some(us) = self.heats_us.take() {
            self.items.hot_until_us.insert(key.pk.clone(), self.now_us + us);
        }
        if self.items.hot_until_us.get(&key.pk).is_some_and(|until| *until > self.now_us) {
            let message = "a partition of the simulated table is hot";
            return Err(TableError::new(TableErrorKind::PartitionThrottled, message));
        }
        let mut loads = vec![((None, key.pk.clone()), bill.table)];
        for (index, partition, units) in &bill.indexes {
            loads.push(((Some(*index), partition.clone()), *units));
        }
        if let Some(most) = self.partition_units {
            let is_over = |(partition, units): &((Option<Index>, String), f64)| {
                let (at, load) = self.items.load.get(partition).copied().unwrap_or_default();
                at == second && load + units > most
            };
            if loads.iter().any(is_over) {
                let message = "a partition has no capacity left in this second";
                return Err(TableError::new(TableErrorKind::PartitionThrottled, message));
            }
        }
        for (partition, units) in loads {
            let load = self.items.load.entry(partition).or_default();
            *load = (second, if load.0 == second { load.1 + units } else { units });
        }
        self.items.totals.table_writes += bill.table;
        for (index, _, units) in &bill.indexes {
            self.items.totals.index_writes[place(*index)] += units;
        }
        Ok(())
    }

    fn put(&mut self, key: &ItemKey, new: Option<Item>) {
        let old = self.items.get(key).cloned();
        if old == new {
            return;
        }
        self.wrote.push((key.clone(), old.clone(), new.clone()));
        self.items.put(key, old.as_ref(), new, self.now_us, self.lag_us);
    }

    pub(crate) fn update(&mut self, update: &Update) -> Result<Updated, TableError> {
        self.items.totals.calls += 1;
        self.items.totals.writing_calls += 1;
        check_update(update)?;
        let old = self.items.get(&update.key).cloned();
        if !all_hold(&update.conditions, old.as_ref()) {
            let bill = Bill::of(self.items, &update.key, old.as_ref(), old.as_ref());
            self.count_write(&update.key, &bill)?;
            return Ok(Updated::Unmet(old, write(bill.total())));
        }
        let new = sized(updated(&update.key, old.as_ref(), &update.actions)?)?;
        let bill = Bill::of(self.items, &update.key, old.as_ref(), Some(&new));
        self.count_write(&update.key, &bill)?;
        self.put(&update.key, Some(new.clone()));
        Ok(Updated::Done(new, write(bill.total())))
    }

    pub(crate) fn transact(&mut self, changes: &[Change]) -> Result<Transacted, TableError> {
        self.items.totals.calls += 1;
        self.items.totals.writing_calls += 1;
        let keys: BTreeSet<&ItemKey> = changes.iter().map(Change::key).collect();
        if changes.is_empty() || changes.len() > TRANSACTION_MAX || keys.len() != changes.len() {
            return Err(rejected("a transaction is of 1 to 100 changes to different items"));
        }
        let (mut unmet, mut bills) = (Vec::new(), Vec::new());
        let mut after = Vec::new();
        for change in changes {
            let key = change.key();
            check_key(key)?;
            let old = self.items.get(key).cloned();
            let holds = all_hold(change.conditions(), old.as_ref());
            let new = match change {
                _ if !holds => old.clone(),
                Change::Update(update) => {
                    check_update(update)?;
                    Some(sized(updated(key, old.as_ref(), &update.actions)?)?)
                }
                Change::Delete(_, conditions) => {
                    check(&[], conditions)?;
                    None
                }
                Change::Check(_, conditions) => {
                    check(&[], conditions)?;
                    old.clone()
                }
            };
            bills.push((key, Bill::of(self.items, key, old.as_ref(), new.as_ref()).times(2.0)));
            unmet.push((!holds).then_some(old));
            after.push((key, new));
        }
        if unmet.iter().any(Option::is_some) {
            // A failed transaction writes to no index.
            let mut total = 0.0;
            for (key, bill) in bills {
                let bill = Bill { table: bill.table, indexes: Vec::new() };
                self.count_write(key, &bill)?;
                total += bill.table;
            }
            return Ok(Transacted::Unmet(unmet, write(total)));
        }
        let mut total = 0.0;
        for (key, bill) in bills {
            self.count_write(key, &bill)?;
            total += bill.total();
        }
        for (key, new) in after {
            self.put(key, new);
        }
        Ok(Transacted::Done(write(total)))
    }

    pub(crate) fn read(&mut self, keys: &[ItemKey], consistency: Consistency) -> BatchRead {
        self.items.totals.calls += 1;
        let mut answer = BatchRead::default();
        for key in keys {
            let found = match (consistency, self.items.before.get(key)) {
                (Consistency::Eventual, Some((before, at)))
                    if at + self.read_lag_us > self.now_us =>
                {
                    before.as_ref()
                }
                _ => self.items.get(key),
            };
            answer.consumed.read += read_units(found.map_or(0, item_size), consistency);
            answer.items.extend(found.cloned());
        }
        self.items.totals.reads += answer.consumed.read;
        answer
    }

    pub(crate) fn delete(&mut self, keys: &[ItemKey]) -> Result<Consumed, TableError> {
        self.items.totals.calls += 1;
        self.items.totals.writing_calls += 1;
        let mut total = 0.0;
        for key in keys {
            check_key(key)?;
            let old = self.items.get(key).cloned();
            let bill = Bill::of(self.items, key, old.as_ref(), None);
            self.count_write(key, &bill)?;
            total += bill.total();
            self.put(key, None);
        }
        Ok(write(total))
    }

    pub(crate) fn query(&mut self, query: &Query) -> Result<QueryOutput, TableError> {
        self.items.totals.calls += 1;
        if !(1..=PAGE_ITEMS_MAX).contains(&query.limit) {
            return Err(rejected(format!("a page of {} items", query.limit)));
        }
        if query.index.is_some() && query.consistency == Consistency::Strong {
            return Err(rejected("an index cannot be read consistently"));
        }
        let rows = match query.index {
            None => self.table_rows(&query.partition),
            Some(index) => self.index_rows(index, &query.partition),
        };
        let in_range = |row: &Row| match &query.range {
            Range::All => true,
            Range::StartsWith(prefix) => row.sort.0.starts_with(prefix),
            Range::Between(from, to) => *from <= row.sort.0 && row.sort.0 <= *to,
        };
        let mut rows: Vec<Row> = rows.into_iter().filter(in_range).collect();
        if query.step == Step::Backward {
            rows.reverse();
        }
        if let Some(after) = &query.after {
            let after = start_of(query, after)?;
            rows.retain(|row| match query.step {
                Step::Forward => row.sort > after,
                Step::Backward => row.sort < after,
            });
        }
        let mut answer =
            QueryOutput { items: Vec::new(), next: None, consumed: Consumed::default() };
        let (mut size, mut last) = (0, None);
        for row in rows {
            let more = item_size(&row.item);
            if answer.items.len() == query.limit || (size + more > PAGE_MAX && last.is_some()) {
                answer.next = last.take();
                break;
            }
            size += more;
            last = Some(row.key);
            answer.items.push(row.item);
        }
        if answer.items.len() == query.limit {
            // A full page has a next key, even if nothing follows.
            answer.next = answer.next.or(last);
        }
        answer.consumed.read = read_units(size, query.consistency);
        self.items.totals.reads += answer.consumed.read;
        Ok(answer)
    }

    fn table_rows(&self, pk: &str) -> Vec<Row> {
        let from = ItemKey::new(pk, "");
        let rows = self.items.items.range(from..).take_while(|(key, _)| key.pk == pk);
        let row = |(key, item): (&ItemKey, &Item)| Row {
            sort: (key.sk.clone(), key.clone()),
            key: Item::from([
                ("PK".to_owned(), Value::text(&*key.pk)),
                ("SK".to_owned(), Value::text(&*key.sk)),
            ]),
            item: item.clone(),
        };
        rows.map(row).collect()
    }

    fn index_rows(&mut self, index: Index, pk: &str) -> Vec<Row> {
        let now_us = self.now_us;
        let view = &mut self.items.indexes[place(index)];
        let entries: Vec<_> = view
            .partition(pk, now_us)
            .map(|((pk, sk, key), item)| (pk.clone(), sk.clone(), key.clone(), item.clone()))
            .collect();
        let row = |(pk, sk, key, item): (String, String, ItemKey, Item)| Row {
            key: view.key_of(&pk, &sk, &key),
            sort: (sk, key),
            item,
        };
        entries.into_iter().map(row).collect()
    }
}

/// An item that a query reads.
struct Row {
    sort: (String, ItemKey),
    key: Item,
    item: Item,
}

fn start_of(query: &Query, after: &Item) -> Result<(String, ItemKey), TableError> {
    let text = |name: &str| {
        let text = after.get(name).and_then(Value::as_str);
        text.map(str::to_owned).ok_or_else(|| rejected(format!("a start key without {name}")))
    };
    let key = ItemKey::new(text("PK")?, text("SK")?);
    let sort = match query.index {
        Some(index) => text(index.sk())?,
        None => key.sk.clone(),
    };
    Ok((sort, key))
}

fn write(units: f64) -> Consumed {
    Consumed { write: units, read: 0.0 }
}

fn read_units(bytes: usize, consistency: Consistency) -> f64 {
    let factor = if consistency == Consistency::Strong { 1.0 } else { 0.5 };
    units(bytes, READ_UNIT) * factor
}

fn check_key(key: &ItemKey) -> Result<(), TableError> {
    let fits = (1..=PK_MAX).contains(&key.pk.len()) && (1..=SK_MAX).contains(&key.sk.len());
    if fits { Ok(()) } else { Err(rejected("a key is empty or too long")) }
}

fn check_update(update: &Update) -> Result<(), TableError> {
    check_key(&update.key)?;
    if update.actions.is_empty() {
        return Err(rejected("an update that does nothing"));
    }
    check(&update.actions, &update.conditions)
}

fn sized(item: Item) -> Result<Item, TableError> {
    if item_size(&item) <= ITEM_MAX { Ok(item) } else { Err(rejected("an item above 400 KB")) }
}
