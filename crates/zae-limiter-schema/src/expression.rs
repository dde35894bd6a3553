//! Updates and conditions as data, and the one place where they become expressions.
//!
//! Attribute names and values never stand in an expression themselves: names may contain `.` and
//! `-`, and may be reserved words. They go through aliases numbered in the order of use.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::value::Value;

/// What an update does to one attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Gives it this value.
    Set(String, Value),
    /// Gives it this value unless it has one.
    SetIfAbsent(String, Value),
    /// Adds to a number (an absent one counts as 0), or texts to a set.
    Add(String, Value),
    /// Takes it away.
    Remove(String),
    /// Takes texts out of a set; an empty set is no attribute.
    Delete(String, Value),
}

/// What must be true of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// It has the attribute.
    Exists(String),
    /// It does not have the attribute.
    Absent(String),
    /// The attribute is there and equal.
    Equal(String, Value),
    /// The attribute is there and at least so much.
    AtLeast(String, Value),
    /// The attribute is there and at most so much.
    AtMost(String, Value),
    /// At least one of these.
    Any(Vec<Condition>),
}

impl Action {
    /// The attribute it changes.
    pub fn attribute(&self) -> &str {
        match self {
            Self::Set(name, _)
            | Self::SetIfAbsent(name, _)
            | Self::Add(name, _)
            | Self::Remove(name)
            | Self::Delete(name, _) => name,
        }
    }
}

/// Expressions with the names and values they refer to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rendered {
    /// The update expression; empty where nothing is changed.
    pub update: String,
    /// The condition expression; empty where nothing is asked.
    pub condition: String,
    /// From aliases to attribute names.
    pub names: BTreeMap<String, String>,
    /// From aliases to values.
    pub values: BTreeMap<String, Value>,
}

/// Renders an update under conditions, all of which must hold.
pub fn render_update(actions: &[Action], conditions: &[Condition]) -> Rendered {
    let mut aliases = Aliases::default();
    let (mut sets, mut adds) = (Vec::new(), Vec::new());
    let (mut removes, mut deletes) = (Vec::new(), Vec::new());
    for action in actions {
        let name = aliases.name(action.attribute());
        match action {
            Action::Set(_, value) => sets.push(format!("{name} = {}", aliases.value(value))),
            Action::SetIfAbsent(_, value) => {
                let value = aliases.value(value);
                sets.push(format!("{name} = if_not_exists({name}, {value})"));
            }
            Action::Add(_, value) => adds.push(format!("{name} {}", aliases.value(value))),
            Action::Remove(_) => removes.push(name),
            Action::Delete(_, value) => deletes.push(format!("{name} {}", aliases.value(value))),
        }
    }
    let mut update = String::new();
    for (keyword, clauses) in
        [("SET", sets), ("ADD", adds), ("REMOVE", removes), ("DELETE", deletes)]
    {
        if !clauses.is_empty() {
            let space = if update.is_empty() { "" } else { " " };
            let _ = write!(update, "{space}{keyword} {}", clauses.join(", "));
        }
    }
    let condition = aliases.all_of(conditions);
    Rendered { update, condition, names: aliases.names, values: aliases.values }
}

/// Renders conditions alone, all of which must hold.
pub fn render_condition(conditions: &[Condition]) -> Rendered {
    render_update(&[], conditions)
}

/// The bounds that two conditions are to one attribute. DynamoDB refuses a range that nothing is in.
fn bounds<'a>(one: &'a Condition, other: &'a Condition) -> Option<(&'a str, &'a Value, &'a Value)> {
    use Condition::{AtLeast, AtMost};
    let (name, low, same, high) = match (one, other) {
        (AtLeast(name, low), AtMost(same, high)) => (name, low, same, high),
        (AtMost(name, high), AtLeast(same, low)) => (name, low, same, high),
        _ => return None,
    };
    let is_range = name == same && low.as_i64()? <= high.as_i64()?;
    is_range.then_some((name, low, high))
}

#[derive(Default)]
struct Aliases {
    names: BTreeMap<String, String>,
    values: BTreeMap<String, Value>,
    by_name: BTreeMap<String, String>,
}

impl Aliases {
    /// One alias for a name, however often it is used.
    fn name(&mut self, name: &str) -> String {
        if let Some(alias) = self.by_name.get(name) {
            return alias.clone();
        }
        let alias = format!("#a{}", self.names.len());
        self.names.insert(alias.clone(), name.to_owned());
        self.by_name.insert(name.to_owned(), alias.clone());
        alias
    }

    fn value(&mut self, value: &Value) -> String {
        let alias = format!(":v{}", self.values.len());
        self.values.insert(alias.clone(), value.clone());
        alias
    }

    /// Bounds of one attribute are one operator: DynamoDB takes no more than 300 in an expression, and
    /// a bucket has up to 32 limits.
    fn all_of(&mut self, conditions: &[Condition]) -> String {
        let mut is_rendered = vec![false; conditions.len()];
        let mut parts = Vec::with_capacity(conditions.len());
        for (place, condition) in conditions.iter().enumerate() {
            if is_rendered[place] {
                continue;
            }
            let upper = (place + 1..conditions.len())
                .filter(|other| !is_rendered[*other])
                .find_map(|other| Some((other, bounds(condition, &conditions[other])?)));
            parts.push(match upper {
                Some((other, (name, low, high))) => {
                    is_rendered[other] = true;
                    let name = self.name(name);
                    let (low, high) = (self.value(low), self.value(high));
                    format!("{name} BETWEEN {low} AND {high}")
                }
                None => self.condition(condition),
            });
        }
        parts.join(" AND ")
    }

    fn condition(&mut self, condition: &Condition) -> String {
        match condition {
            Condition::Exists(name) => format!("attribute_exists({})", self.name(name)),
            Condition::Absent(name) => format!("attribute_not_exists({})", self.name(name)),
            Condition::Equal(name, value) => self.compare(name, "=", value),
            Condition::AtLeast(name, value) => self.compare(name, ">=", value),
            Condition::AtMost(name, value) => self.compare(name, "<=", value),
            Condition::Any(conditions) => {
                let parts: Vec<String> = conditions.iter().map(|one| self.condition(one)).collect();
                format!("({})", parts.join(" OR "))
            }
        }
    }

    fn compare(&mut self, name: &str, operator: &str, value: &Value) -> String {
        let name = self.name(name);
        format!("{name} {operator} {}", self.value(value))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn everything_goes_through_aliases() {
        let n = Value::number;
        let set = Value::Ss(BTreeSet::from(["gpt-4".to_owned()]));
        let actions = [
            Action::Set("b_a.b-c_tk".to_owned(), n(1)),
            Action::Add("b_a.b-c_tc".to_owned(), n(2)),
            Action::SetIfAbsent("status".to_owned(), Value::text("x")),
            Action::Remove("ttl".to_owned()),
            Action::Delete("resources".to_owned(), set),
        ];
        let conditions = [
            Condition::Exists("PK".to_owned()),
            Condition::AtLeast("b_a.b-c_tk".to_owned(), n(3)),
            Condition::AtMost("b_a.b-c_tk".to_owned(), n(4)),
            Condition::Any(vec![
                Condition::Absent("ttl".to_owned()),
                Condition::Equal("ttl".to_owned(), n(5)),
            ]),
        ];
        insta::assert_debug_snapshot!(render_update(&actions, &conditions));
        assert_eq!(render_condition(&[]), Rendered::default());
    }

    #[test]
    fn bounds_are_one_operator_wherever_they_stand() {
        let at_least = |name: &str, n| Condition::AtLeast(name.to_owned(), Value::number(n));
        let at_most = |name: &str, n| Condition::AtMost(name.to_owned(), Value::number(n));
        let check = |conditions: &[Condition], wanted: &str| {
            assert_eq!(render_condition(conditions).condition, wanted, "{conditions:?}");
        };
        let (range, alone) = ("#a0 BETWEEN :v0 AND :v1", "#a0 >= :v0 AND #a1 <= :v1");
        check(&[at_least("a", 1), at_most("a", 1)], range);
        check(&[at_most("a", 2), at_least("a", 1)], range);
        check(&[at_least("a", 1), at_most("b", 2)], alone);
        // DynamoDB refuses a range that nothing is in; two comparisons are merely never met.
        check(&[at_least("a", 2), at_most("a", 1)], "#a0 >= :v0 AND #a0 <= :v1");
        check(
            &[at_least("a", 1), at_least("b", 3), at_most("a", 2), at_least("a", 0)],
            "#a0 BETWEEN :v0 AND :v1 AND #a1 >= :v2 AND #a0 >= :v3",
        );
    }
}
