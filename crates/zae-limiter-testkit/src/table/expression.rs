//! Evaluates conditions and actions, and rejects what DynamoDB rejects.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use zae_limiter_schema::{
    Action, Condition, Index, Item, ItemKey, TableError, TableErrorKind, Value, render_update,
};

use super::number::Decimal;

/// The longest expression in bytes.
const EXPRESSION_BYTES_MAX: usize = 4_096;
/// The most operators and functions in one expression, counted generously.
const OPERATORS_MAX: usize = 300;

pub(crate) fn rejected(message: impl Into<String>) -> TableError {
    TableError::new(TableErrorKind::Rejected, message)
}

/// Whether all conditions hold for an item. A comparison with a missing attribute, or with a value
/// of another type, does not hold.
pub(crate) fn all_hold(conditions: &[Condition], item: Option<&Item>) -> bool {
    conditions.iter().all(|condition| holds(condition, item))
}

fn holds(condition: &Condition, item: Option<&Item>) -> bool {
    let value = |name: &String| item.and_then(|item| item.get(name));
    match condition {
        Condition::Exists(name) => value(name).is_some(),
        Condition::Absent(name) => value(name).is_none(),
        Condition::Equal(name, wanted) => value(name).is_some_and(|value| equal(value, wanted)),
        Condition::AtLeast(name, bound) => value(name)
            .and_then(|value| order(value, bound))
            .is_some_and(|order| order != Ordering::Less),
        Condition::AtMost(name, bound) => value(name)
            .and_then(|value| order(value, bound))
            .is_some_and(|order| order != Ordering::Greater),
        Condition::Any(conditions) => conditions.iter().any(|condition| holds(condition, item)),
    }
}

fn equal(value: &Value, wanted: &Value) -> bool {
    match (value, wanted) {
        (Value::N(_), Value::N(_)) => order(value, wanted) == Some(Ordering::Equal),
        _ => value == wanted,
    }
}

fn order(value: &Value, bound: &Value) -> Option<Ordering> {
    match (value, bound) {
        (Value::N(value), Value::N(bound)) => {
            Some(Decimal::parse(value)?.compare(Decimal::parse(bound)?))
        }
        (Value::S(value), Value::S(bound)) => Some(value.as_bytes().cmp(bound.as_bytes())),
        _ => None,
    }
}

/// Rejects what DynamoDB rejects without reading an item.
pub(crate) fn check(actions: &[Action], conditions: &[Condition]) -> Result<(), TableError> {
    let mut changed = BTreeSet::new();
    for action in actions {
        let name = action.attribute();
        if !changed.insert(name) {
            return Err(rejected(format!("two document paths overlap: {name}")));
        }
        if name == "PK" || name == "SK" {
            return Err(rejected(format!("{name} is part of the key and cannot be updated")));
        }
        match action {
            Action::Set(_, value) | Action::SetIfAbsent(_, value) => check_stored(name, value)?,
            Action::Add(_, value @ (Value::N(_) | Value::Ss(_)))
            | Action::Delete(_, value @ Value::Ss(_)) => check_value(value)?,
            Action::Add(..) | Action::Delete(..) => {
                return Err(rejected(format!("wrong type of operand for {name}")));
            }
            Action::Remove(_) => {}
        }
    }
    for condition in conditions {
        check_condition(condition)?;
    }
    let rendered = render_update(actions, conditions);
    for expression in [&rendered.update, &rendered.condition] {
        if expression.len() > EXPRESSION_BYTES_MAX {
            return Err(rejected(format!("an expression of {} bytes", expression.len())));
        }
    }
    let operators = operators(&rendered.condition);
    if operators > OPERATORS_MAX {
        return Err(rejected(format!("an expression with {operators} operators")));
    }
    Ok(())
}

/// Counts comparisons, functions, `AND` and `OR`. The `AND` of a range belongs to its `BETWEEN`.
fn operators(condition: &str) -> usize {
    let count =
        |wanted: &[&str]| condition.split_whitespace().filter(|word| wanted.contains(word)).count();
    // A parenthesis around an OR counts, too: that errs on the safe side.
    let functions = condition.matches('(').count();
    // A BETWEEN is one more operator and one AND less.
    functions + count(&["AND", "OR", "=", "<=", ">="])
}

fn check_condition(condition: &Condition) -> Result<(), TableError> {
    match condition {
        Condition::Exists(_) | Condition::Absent(_) => Ok(()),
        Condition::Equal(_, value) | Condition::AtLeast(_, value) | Condition::AtMost(_, value) => {
            check_value(value)
        }
        Condition::Any(conditions) if conditions.is_empty() => Err(rejected("an empty OR")),
        Condition::Any(conditions) => conditions.iter().try_for_each(check_condition),
    }
}

fn check_value(value: &Value) -> Result<(), TableError> {
    match value {
        Value::N(number) if Decimal::parse(number).is_none() => {
            Err(rejected(format!("not a number of at most 38 digits: {number}")))
        }
        Value::Ss(texts) if texts.is_empty() => Err(rejected("an empty set")),
        Value::M(members) => members.values().try_for_each(check_value),
        Value::L(members) => members.iter().try_for_each(check_value),
        _ => Ok(()),
    }
}

fn check_stored(name: &str, value: &Value) -> Result<(), TableError> {
    let is_index_key = Index::ALL.iter().any(|index| index.pk() == name || index.sk() == name);
    if is_index_key && !matches!(value, Value::S(text) if !text.is_empty()) {
        return Err(rejected(format!("{name} is the key of an index and must be a text")));
    }
    check_value(value)
}

/// The item after the actions, each of which sees the old one.
pub(crate) fn updated(
    key: &ItemKey,
    old: Option<&Item>,
    actions: &[Action],
) -> Result<Item, TableError> {
    let mut item = old.cloned().unwrap_or_default();
    item.insert("PK".to_owned(), Value::text(&*key.pk));
    item.insert("SK".to_owned(), Value::text(&*key.sk));
    for action in actions {
        let name = action.attribute();
        match action {
            Action::Set(_, value) => drop(item.insert(name.to_owned(), normal(value))),
            Action::SetIfAbsent(_, value) => {
                item.entry(name.to_owned()).or_insert_with(|| normal(value));
            }
            Action::Remove(_) => drop(item.remove(name)),
            Action::Add(_, value) => {
                let sum = added(item.get(name), value)
                    .ok_or_else(|| rejected(format!("cannot add to {name}")))?;
                item.insert(name.to_owned(), sum);
            }
            Action::Delete(_, deleted) => match (item.get_mut(name), deleted) {
                (None, _) => {}
                (Some(Value::Ss(texts)), Value::Ss(deleted)) => {
                    texts.retain(|text| !deleted.contains(text));
                    if texts.is_empty() {
                        item.remove(name);
                    }
                }
                _ => return Err(rejected(format!("{name} is not a set"))),
            },
        }
    }
    Ok(item)
}

fn added(value: Option<&Value>, more: &Value) -> Option<Value> {
    match (value, more) {
        (None, more) => Some(normal(more)),
        (Some(Value::N(value)), Value::N(more)) => {
            Some(Value::N(Decimal::parse(value)?.plus(Decimal::parse(more)?)?.text()))
        }
        (Some(Value::Ss(texts)), Value::Ss(more)) => Some(Value::Ss(texts | more)),
        _ => None,
    }
}

/// Normalises numbers: DynamoDB returns them without superfluous zeros.
fn normal(value: &Value) -> Value {
    match value {
        Value::N(number) => {
            Value::N(Decimal::parse(number).map_or_else(|| number.clone(), Decimal::text))
        }
        _ => value.clone(),
    }
}
