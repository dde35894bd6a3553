//! A table in memory: no costs, no faults, no delays, and indexes that are never behind.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Mutex;

use zae_limiter_schema::{
    Action, BatchRead, Calling, Change, Condition, Consistency, Consumed, Index, Item, ItemKey,
    Query, QueryAnswer, Range, Step, Table, TableError, TableErrorKind, Transacted, Update,
    Updated, Value,
};

#[derive(Debug, Default)]
pub(crate) struct FakeTable {
    items: Mutex<BTreeMap<ItemKey, Item>>,
    /// So many transactions still meet another one.
    pub(crate) collisions: Mutex<u32>,
}

impl FakeTable {
    pub(crate) fn items(&self) -> BTreeMap<ItemKey, Item> {
        self.items.lock().unwrap().clone()
    }

    /// Puts an item as another client would.
    pub(crate) fn put(&self, key: &ItemKey, attributes: &[(&str, Value)]) {
        let mut item = keys_of(key);
        item.extend(attributes.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        self.items.lock().unwrap().insert(key.clone(), item);
    }
}

fn keys_of(key: &ItemKey) -> Item {
    let text = |text: &String| Value::S(text.clone());
    Item::from([("PK".to_owned(), text(&key.pk)), ("SK".to_owned(), text(&key.sk))])
}

fn number(value: &Value) -> Option<i128> {
    match value {
        Value::N(number) => number.parse().ok(),
        _ => None,
    }
}

fn is_met(condition: &Condition, item: Option<&Item>) -> bool {
    let get = |name: &String| item.and_then(|item| item.get(name));
    let compares = |name, value: &Value, wanted: fn(Ordering) -> bool| {
        let there = get(name).and_then(number).zip(number(value));
        there.is_some_and(|(there, value)| wanted(there.cmp(&value)))
    };
    match condition {
        Condition::Exists(name) => get(name).is_some(),
        Condition::Absent(name) => get(name).is_none(),
        Condition::Equal(name, value) => get(name) == Some(value),
        Condition::AtLeast(name, value) => compares(name, value, Ordering::is_ge),
        Condition::AtMost(name, value) => compares(name, value, Ordering::is_le),
        Condition::Any(any) => any.iter().any(|one| is_met(one, item)),
    }
}

fn all_met(conditions: &[Condition], item: Option<&Item>) -> bool {
    conditions.iter().all(|one| is_met(one, item))
}

fn apply(item: &mut Item, action: &Action) {
    assert!(!["PK", "SK"].contains(&action.attribute()), "a key cannot be changed: {action:?}");
    match action {
        Action::Set(name, value) => drop(item.insert(name.clone(), value.clone())),
        Action::SetIfAbsent(name, value) => {
            item.entry(name.clone()).or_insert_with(|| value.clone());
        }
        Action::Remove(name) => drop(item.remove(name)),
        Action::Add(name, Value::Ss(more)) => {
            match item.entry(name.clone()).or_insert_with(|| Value::Ss(Default::default())) {
                Value::Ss(texts) => texts.extend(more.iter().cloned()),
                other => panic!("{name} is {other:?}, not a set"),
            }
        }
        Action::Add(name, by) => {
            let by = number(by).expect("a number is added");
            let now = item.get(name).map_or(Some(0), number).expect("to a number");
            item.insert(name.clone(), Value::N((now + by).to_string()));
        }
        Action::Delete(name, Value::Ss(less)) => {
            if let Some(Value::Ss(texts)) = item.get_mut(name) {
                texts.retain(|text| !less.contains(text));
                if texts.is_empty() {
                    item.remove(name);
                }
            }
        }
        Action::Delete(name, other) => panic!("{other:?} cannot be taken out of {name}"),
    }
}

fn updated(key: &ItemKey, item: Option<&Item>, update: &Update) -> Item {
    assert!(!update.actions.is_empty(), "an update must do something");
    let mut names: Vec<&str> = update.actions.iter().map(Action::attribute).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|two| two[0] != two[1]), "an attribute twice: {names:?}");
    let mut item = item.cloned().unwrap_or_else(|| keys_of(key));
    update.actions.iter().for_each(|action| apply(&mut item, action));
    for index in Index::ALL {
        for name in [index.pk(), index.sk()] {
            let value = item.get(name);
            let is_key =
                value.is_none_or(|value| value.as_str().is_some_and(|key| !key.is_empty()));
            assert!(is_key, "{name} is {value:?}");
        }
    }
    item
}

/// Where an item stands in a partition, if it stands there at all.
type Place = (String, ItemKey);

fn place(query: &Query, key: &ItemKey, item: &Item) -> Option<Place> {
    let (pk, sk) = query.index.map_or(("PK", "SK"), |index| (index.pk(), index.sk()));
    let text = |name| item.get(name).and_then(Value::as_str);
    let sk = text(sk)?;
    let is_in = match &query.range {
        Range::All => true,
        Range::StartsWith(start) => sk.starts_with(start),
        Range::Between(from, to) => {
            assert!(from <= to, "an empty range is refused: {from} to {to}");
            sk >= from.as_str() && sk <= to.as_str()
        }
    };
    (text(pk)? == query.partition && is_in).then(|| (sk.to_owned(), key.clone()))
}

fn projected(index: Option<Index>, item: &Item) -> Item {
    let Some(index) = index.filter(|index| *index != Index::Parent) else { return item.clone() };
    let names = ["PK", "SK", index.pk(), index.sk()];
    item.iter()
        .filter(|(name, _)| names.contains(&name.as_str()))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

fn answer(items: &BTreeMap<ItemKey, Item>, query: &Query) -> QueryAnswer {
    assert!((1..=zae_limiter_schema::PAGE_ITEMS_MAX).contains(&query.limit));
    let mut found: Vec<(Place, &Item)> =
        items.iter().filter_map(|(key, item)| Some((place(query, key, item)?, item))).collect();
    found.sort_by(|(a, _), (b, _)| a.cmp(b));
    if query.step == Step::Backward {
        found.reverse();
    }
    if let Some(after) = &query.after {
        let text = |name| after.get(name).and_then(Value::as_str).expect("a whole key");
        let sk = query.index.map_or("SK", Index::sk);
        let pk = query.index.map_or("PK", Index::pk);
        assert_eq!(text(pk), query.partition);
        let after = (text(sk).to_owned(), ItemKey::new(text("PK"), text("SK")));
        found.retain(|(place, _)| match query.step {
            Step::Forward => *place > after,
            Step::Backward => *place < after,
        });
    }
    let is_last = found.len() < query.limit;
    found.truncate(query.limit);
    let keys = |item: &Item| {
        let names =
            ["PK", "SK"].into_iter().chain(query.index.into_iter().flat_map(|i| [i.pk(), i.sk()]));
        names.map(|name| (name.to_owned(), item[name].clone())).collect()
    };
    QueryAnswer {
        // As DynamoDB does, a full page is never the last one.
        next: found.last().filter(|_| !is_last).map(|(_, item)| keys(item)),
        items: found.iter().map(|(_, item)| projected(query.index, item)).collect(),
        consumed: Consumed::default(),
    }
}

impl Table for FakeTable {
    fn update<'a>(&'a self, update: &'a Update) -> Calling<'a, Updated> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            let mut items = self.items.lock().unwrap();
            let now = items.get(&update.key);
            if !all_met(&update.conditions, now) {
                return Ok(Updated::Unmet(now.cloned(), Consumed::default()));
            }
            let item = updated(&update.key, now, update);
            items.insert(update.key.clone(), item.clone());
            Ok(Updated::Done(item, Consumed::default()))
        })
    }

    fn transact<'a>(&'a self, changes: &'a [Change]) -> Calling<'a, Transacted> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            let collides = {
                let mut left = self.collisions.lock().unwrap();
                let collides = *left > 0;
                *left -= u32::from(collides);
                collides
            };
            if collides {
                return Err(TableError::new(TableErrorKind::Conflict, "another transaction"));
            }
            let mut items = self.items.lock().unwrap();
            assert!((1..=100).contains(&changes.len()));
            let mut keys: Vec<&ItemKey> = changes.iter().map(Change::key).collect();
            keys.sort_unstable();
            assert!(keys.windows(2).all(|two| two[0] != two[1]), "an item twice");
            let failed: Vec<Option<Option<Item>>> = changes
                .iter()
                .map(|change| {
                    let now = items.get(change.key());
                    (!all_met(change.conditions(), now)).then(|| now.cloned())
                })
                .collect();
            if failed.iter().any(Option::is_some) {
                return Ok(Transacted::Unmet(failed, Consumed::default()));
            }
            for change in changes {
                match change {
                    Change::Update(update) => {
                        let item = updated(&update.key, items.get(&update.key), update);
                        items.insert(update.key.clone(), item);
                    }
                    Change::Delete(key, _) => drop(items.remove(key)),
                    Change::Check(_, conditions) => assert!(!conditions.is_empty()),
                }
            }
            Ok(Transacted::Done(Consumed::default()))
        })
    }

    fn read<'a>(&'a self, keys: &'a [ItemKey], _: Consistency) -> Calling<'a, BatchRead> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            let items = self.items.lock().unwrap();
            let found = keys.iter().filter_map(|key| items.get(key).cloned()).collect();
            Ok(BatchRead { items: found, consumed: Consumed::default() })
        })
    }

    fn query<'a>(&'a self, query: &'a Query) -> Calling<'a, QueryAnswer> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            Ok(answer(&self.items.lock().unwrap(), query))
        })
    }

    fn delete<'a>(&'a self, keys: &'a [ItemKey]) -> Calling<'a, Consumed> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            let mut items = self.items.lock().unwrap();
            keys.iter().for_each(|key| drop(items.remove(key)));
            Ok(Consumed::default())
        })
    }
}
