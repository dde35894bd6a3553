//! Updates and conditions as data, and their rendering as expressions.
//!
//! Values always have an alias. Names have one unless they are plain identifiers that cannot be reserved
//! words: limit names may contain `.` and `-`. Aliases are numbered in the order of use. A name without
//! an alias is shorter to send and cheaper to parse.

use crate::value::Value;

/// A change of one attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Sets the value.
    Set(String, Value),
    /// Sets the value unless the attribute exists.
    SetIfAbsent(String, Value),
    /// Adds to a number, where absent counts as 0, or adds texts to a set.
    Add(String, Value),
    /// Removes the attribute.
    Remove(String),
    /// Removes texts from a set. DynamoDB removes an empty set.
    Delete(String, Value),
}

/// What must hold for an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The attribute exists.
    Exists(String),
    /// The attribute does not exist.
    Absent(String),
    /// The attribute exists and equals the value.
    Equal(String, Value),
    /// The attribute exists and is not below the value.
    AtLeast(String, Value),
    /// The attribute exists and is not above the value.
    AtMost(String, Value),
    /// At least one of these holds.
    Any(Vec<Condition>),
}

impl Action {
    fn keyword(&self) -> &'static str {
        match self {
            Self::Set(..) | Self::SetIfAbsent(..) => "SET",
            Self::Add(..) => "ADD",
            Self::Remove(_) => "REMOVE",
            Self::Delete(..) => "DELETE",
        }
    }

    /// The attribute that it changes.
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
    /// The update expression; empty without actions.
    pub update: String,
    /// The condition expression; empty without conditions.
    pub condition: String,
    /// Aliases and their attributes.
    pub names: Vec<(String, String)>,
    /// Aliases and their values.
    pub values: Vec<(String, Value)>,
}

/// Renders an update under conditions, all of which must hold.
pub fn render_update(actions: &[Action], conditions: &[Condition]) -> Rendered {
    let mut aliases = Aliases::for_terms(actions.len() + conditions.len());
    let mut update = String::new();
    for keyword in ["SET", "ADD", "REMOVE", "DELETE"] {
        let mut is_first = true;
        for action in actions.iter().filter(|action| action.keyword() == keyword) {
            let before = match (is_first, update.is_empty()) {
                (false, _) => ", ",
                (true, false) => " ",
                (true, true) => "",
            };
            update.push_str(before);
            if std::mem::take(&mut is_first) {
                update.push_str(keyword);
                update.push(' ');
            }
            aliases.action(&mut update, action);
        }
    }
    let mut condition = String::new();
    aliases.all_of(&mut condition, conditions);
    let names = aliases.names.into_iter().enumerate();
    let values = aliases.values.into_iter().enumerate();
    Rendered {
        update,
        condition,
        names: names.map(|(at, name)| (alias("#a", at), name.to_owned())).collect(),
        values: values.map(|(at, value)| (alias(":v", at), value.clone())).collect(),
    }
}

/// Renders conditions alone, all of which must hold.
pub fn render_condition(conditions: &[Condition]) -> Rendered {
    render_update(&[], conditions)
}

/// The lower and upper bound of one attribute, if two conditions are that. DynamoDB refuses an empty range.
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

/// Whether a name needs no alias. No reserved word of DynamoDB starts with `b_`.
fn is_plain(name: &str) -> bool {
    let is_identifier = |name: &str| name.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_');
    matches!(name, "rf" | "gn" | "rm_at") || (name.starts_with("b_") && is_identifier(name))
}

/// With more actions and conditions than this every name has an alias: an expression has at most 4 KiB.
const PLAIN_TERMS_MAX: usize = 24;

// Without `write!`, which took a tenth of the time of a write: there are dozens of aliases in each.
fn push_alias(into: &mut String, kind: &str, number: usize) {
    into.push_str(kind);
    let digit = |number: usize| char::from_digit(u32::try_from(number % 10).unwrap_or(0), 10);
    let places = [1_000, 100, 10].into_iter().filter(|place| number >= *place);
    into.extend(places.filter_map(|place| digit(number / place)));
    into.extend(digit(number));
}

fn alias(kind: &str, number: usize) -> String {
    let mut alias = String::with_capacity(5);
    push_alias(&mut alias, kind, number);
    alias
}

struct Aliases<'a> {
    names: Vec<&'a str>,
    values: Vec<&'a Value>,
    may_be_plain: bool,
}

impl<'a> Aliases<'a> {
    fn for_terms(count: usize) -> Self {
        Self {
            names: Vec::new(),
            values: Vec::with_capacity(2 * count),
            may_be_plain: count <= PLAIN_TERMS_MAX,
        }
    }

    /// Renders a plain name, or its alias. A name has one alias, however often it is used.
    fn name(&mut self, into: &mut String, name: &'a str) {
        if self.may_be_plain && is_plain(name) {
            into.push_str(name);
            return;
        }
        let at = self.names.iter().position(|other| *other == name).unwrap_or_else(|| {
            self.names.push(name);
            self.names.len() - 1
        });
        push_alias(into, "#a", at);
    }

    fn value(&mut self, into: &mut String, value: &'a Value) {
        push_alias(into, ":v", self.values.len());
        self.values.push(value);
    }

    fn action(&mut self, into: &mut String, action: &'a Action) {
        let name = action.attribute();
        self.name(into, name);
        match action {
            Action::Set(_, value) => {
                into.push_str(" = ");
                self.value(into, value);
            }
            Action::SetIfAbsent(_, value) => {
                into.push_str(" = if_not_exists(");
                self.name(into, name);
                into.push_str(", ");
                self.value(into, value);
                into.push(')');
            }
            Action::Add(_, value) | Action::Delete(_, value) => {
                into.push(' ');
                self.value(into, value);
            }
            Action::Remove(_) => {}
        }
    }

    /// Renders two bounds of one attribute as one `BETWEEN`: an expression has at most 300 operators, and
    /// a bucket has up to 32 limits.
    fn all_of(&mut self, into: &mut String, conditions: &'a [Condition]) {
        let mut is_rendered = vec![false; conditions.len()];
        for (place, condition) in conditions.iter().enumerate() {
            if is_rendered[place] {
                continue;
            }
            if !into.is_empty() {
                into.push_str(" AND ");
            }
            let upper = (place + 1..conditions.len())
                .filter(|other| !is_rendered[*other])
                .find_map(|other| Some((other, bounds(condition, &conditions[other])?)));
            match upper {
                Some((other, (name, low, high))) => {
                    is_rendered[other] = true;
                    self.compare(into, name, " BETWEEN ", low);
                    into.push_str(" AND ");
                    self.value(into, high);
                }
                None => self.condition(into, condition),
            }
        }
    }

    fn condition(&mut self, into: &mut String, condition: &'a Condition) {
        match condition {
            Condition::Exists(name) => self.function(into, "attribute_exists(", name),
            Condition::Absent(name) => self.function(into, "attribute_not_exists(", name),
            Condition::Equal(name, value) => self.compare(into, name, " = ", value),
            Condition::AtLeast(name, value) => self.compare(into, name, " >= ", value),
            Condition::AtMost(name, value) => self.compare(into, name, " <= ", value),
            Condition::Any(conditions) => {
                let mut before = "(";
                for one in conditions {
                    into.push_str(std::mem::replace(&mut before, " OR "));
                    self.condition(into, one);
                }
                into.push(')');
            }
        }
    }

    fn function(&mut self, into: &mut String, opened: &str, name: &'a str) {
        into.push_str(opened);
        self.name(into, name);
        into.push(')');
    }

    fn compare(&mut self, into: &mut String, name: &'a str, operator: &str, value: &'a Value) {
        self.name(into, name);
        into.push_str(operator);
        self.value(into, value);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_that_need_an_alias_have_one() {
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
    fn aliases_are_numbered() {
        for number in [0, 7, 10, 99, 100, 109, 321, 1_024] {
            assert_eq!(alias(":v", number), format!(":v{number}"));
        }
    }

    #[test]
    fn only_plain_identifiers_have_no_alias() {
        let condition = |name: &str| render_condition(&[Condition::Exists(name.to_owned())]);
        for name in ["rf", "gn", "b_rpm_tk", "b_RPM_2_tk"] {
            assert_eq!(condition(name).condition, format!("attribute_exists({name})"));
            assert_eq!(condition(name).names, []);
        }
        for name in ["ttl", "PK", "b_a.b_tk", "b_a-b_tk", "b_\u{e9}_tk", "status"] {
            assert_eq!(condition(name).condition, "attribute_exists(#a0)");
            assert_eq!(condition(name).names, [("#a0".to_owned(), name.to_owned())]);
        }
        // Aliases keep long expressions below 4 KiB.
        let many: Vec<Condition> =
            (0..25).map(|n| Condition::Exists(format!("b_{n}_tk"))).collect();
        assert_eq!(render_condition(&many[..24]).names.len(), 0);
        assert_eq!(render_condition(&many).names.len(), 25);
    }

    #[test]
    fn two_bounds_of_an_attribute_are_one_operator() {
        let at_least = |name: &str, n| Condition::AtLeast(name.to_owned(), Value::number(n));
        let at_most = |name: &str, n| Condition::AtMost(name.to_owned(), Value::number(n));
        let check = |conditions: &[Condition], wanted: &str| {
            assert_eq!(render_condition(conditions).condition, wanted, "{conditions:?}");
        };
        let (range, alone) = ("#a0 BETWEEN :v0 AND :v1", "#a0 >= :v0 AND #a1 <= :v1");
        check(&[at_least("a", 1), at_most("a", 1)], range);
        check(&[at_most("a", 2), at_least("a", 1)], range);
        check(&[at_least("a", 1), at_most("b", 2)], alone);
        // DynamoDB refuses an empty range; two comparisons merely never hold.
        check(&[at_least("a", 2), at_most("a", 1)], "#a0 >= :v0 AND #a0 <= :v1");
        check(
            &[at_least("a", 1), at_least("b", 3), at_most("a", 2), at_least("a", 0)],
            "#a0 BETWEEN :v0 AND :v1 AND #a1 >= :v2 AND #a0 >= :v3",
        );
    }
}
