//! Names and addresses. The rules are the model's; here is where a text breaks them.

use std::ops::Range;
use std::str::FromStr;

use zae_limiter::StoreUrl;
use zae_limiter::model::{
    DEFAULT_RESOURCE, EntityId, Invalid, LimitName, NamespaceId, NamespaceName, ResourceName,
    StackName,
};

use super::Misread;

/// Points at the part of a name that breaks its rule: the shortest start that is wrong tells
/// which character it is.
fn point_at<T: FromStr<Err = Invalid>>(input: &str, name: &str) -> Result<T, Misread> {
    let check = T::from_str;
    let invalid = match check(name) {
        Ok(name) => return Ok(name),
        Err(invalid) => invalid,
    };
    // Behind a letter that every kind of name may start with, each character is judged by itself.
    let alone = |c: char| check(&format!("a{c}")).is_err();
    let first_is_wrong = name.chars().next().is_some_and(|c| check(&c.to_string()).is_err());
    let wrong = name.char_indices().find(|(at, c)| alone(*c) || (*at == 0 && first_is_wrong));
    let part = match wrong {
        Some((at, c)) => &name[at..at + c.len_utf8()],
        // All of it: too long, empty, reserved.
        None => name,
    };
    let what = invalid.field();
    let problem = match part {
        _ if name.is_empty() => format!("the {what} is missing"),
        _ if part.len() == name.len() && name.len() > 1 => format!("{name:?} cannot be a {what}"),
        part => format!("{part:?} cannot stand here in a {what}"),
    };
    let problem = problem.replace("a entity", "an entity");
    Err(Misread::new(input, Misread::place(input, part), problem, invalid.rule()))
}

macro_rules! readers {
    ($($(#[$doc:meta])* $reader:ident: $name:ty;)+) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        ///
        /// [`Misread`], pointing at the part that is wrong.
        pub fn $reader(input: &str) -> Result<$name, Misread> {
            point_at(input, input)
        }
    )+};
}

readers! {
    /// Reads an entity id.
    entity_id: EntityId;
    /// Reads a resource.
    resource: ResourceName;
    /// Reads the name of a limit.
    limit_name: LimitName;
    /// Reads the name of a namespace.
    namespace_name: NamespaceName;
    /// Reads the name of a stack.
    stack_name: StackName;
}

/// Reads the id of a namespace.
///
/// # Errors
///
/// [`Misread`], pointing at the part that is wrong.
pub fn namespace_id(input: &str) -> Result<NamespaceId, Misread> {
    NamespaceId::new(input).map_err(|invalid| {
        let problem = format!("{input:?} is not the id of a namespace");
        let rule = format!("{}; `namespace orphans` and `namespace list` show ids", invalid.rule());
        Misread::new(input, 0..input.len(), problem, rule)
    })
}

/// What limits of an entity are for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Resources {
    /// All resources that the entity has no limits of their own for: `_default_`.
    #[default]
    All,
    /// One resource.
    One(ResourceName),
}

impl Resources {
    /// The one resource, if it is one.
    pub fn one(&self) -> Option<&str> {
        match self {
            Self::All => None,
            Self::One(resource) => Some(resource.as_str()),
        }
    }
}

/// Reads a resource, or `_default_` for all of them.
///
/// # Errors
///
/// [`Misread`], pointing at the part that is wrong.
pub fn resource_or_default(input: &str) -> Result<Resources, Misread> {
    if input == DEFAULT_RESOURCE { Ok(Resources::All) } else { resource(input).map(Resources::One) }
}

/// Checks the name of a limit that is a part of `input`.
pub(super) fn limit_name_in(input: &str, name: &str) -> Result<(), Misread> {
    point_at::<LimitName>(input, name).map(|_| ())
}

/// Reads the name of a table that is to be made: a stack's, and DynamoDB asks for three characters.
///
/// # Errors
///
/// [`Misread`], pointing at the part that is wrong.
pub fn table_name(input: &str) -> Result<StackName, Misread> {
    const RULE: &str = "use 3 to 55 of A-Z a-z 0-9 -, starting with a letter";
    let name = stack_name(input)?;
    if input.len() < 3 {
        let problem = format!("{input:?} is too short for a table");
        return Err(Misread::new(input, 0..input.len(), problem, RULE));
    }
    Ok(name)
}

/// Reads the address of a store.
///
/// # Errors
///
/// [`Misread`], pointing at the part that is wrong.
pub fn store_url(input: &str) -> Result<String, Misread> {
    match input.parse::<StoreUrl>() {
        Ok(_) => Ok(input.to_owned()),
        Err(invalid) => {
            let part = part_of_url(input, invalid.value());
            Err(Misread::new(input, part, "this is not the address of a store", invalid.rule()))
        }
    }
}

/// Reads the name of an AWS region.
///
/// # Errors
///
/// [`Misread`] with the rule.
pub fn region(input: &str) -> Result<String, Misread> {
    let misread = |invalid: Invalid| {
        Misread::new(input, 0..input.len(), "this is not an AWS region", invalid.rule())
    };
    StoreUrl::check_region(input).map(|()| input.to_owned()).map_err(misread)
}

/// Reads the URL of an endpoint.
///
/// # Errors
///
/// [`Misread`] with the rule.
pub fn endpoint_url(input: &str) -> Result<String, Misread> {
    let misread = |invalid: Invalid| {
        Misread::new(input, 0..input.len(), "this is not the URL of an endpoint", invalid.rule())
    };
    StoreUrl::check_endpoint(input).map(|()| input.to_owned()).map_err(misread)
}

/// Where a part of an address stands: at its start, or behind one of its marks, and not wherever else
/// the same letters are. Of several that are alike, the last.
fn part_of_url(url: &str, part: &str) -> Range<usize> {
    let marks = url.match_indices([':', '?', '&']).map(|(at, _)| at + 1);
    let begins = std::iter::once(0).chain(marks);
    let ends = |end: usize| url[end..].is_empty() || url[end..].starts_with([':', '?', '&']);
    let mut found = begins.filter(|at| url[*at..].starts_with(part) && ends(at + part.len()));
    let found = found.next_back();
    found.map_or(0..url.len(), |at| at..at + part.len())
}

/// Reads `key=value`.
///
/// # Errors
///
/// [`Misread`], pointing at the part that is wrong.
pub fn key_value(input: &str) -> Result<(String, String), Misread> {
    const RULE: &str = "write key=value, as in team=search";
    match input.split_once('=') {
        Some(("", _)) => Err(Misread::new(input, 0..0, "the key is missing", RULE)),
        Some((key, value)) => Ok((key.to_owned(), value.to_owned())),
        None => Err(Misread::new(input, input.len()..input.len(), "an = is missing", RULE)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_name_is_pointed_at() {
        let long = "a".repeat(257);
        for (text, wrong_part) in [
            ("a#b", "#"),
            ("", ""),
            ("#", "#"),
            ("-a", "-"),
            ("a b", " "),
            ("aüb", "ü"),
            (&long, &long),
        ] {
            assert_eq!(&text[entity_id(text).expect_err(text).at()], wrong_part, "{text}");
        }
        assert!(entity_id("key-1:a@b.c").is_ok());
        assert_eq!(&"a/b"[namespace_name("a/b").expect_err("a/b").at()], "/");
        assert_eq!(&"1a"[resource("1a").expect_err("1a").at()], "1");
        assert_eq!(resource_or_default("_default_"), Ok(Resources::All));
        assert!(namespace_id("short").is_err());
        assert_eq!(table_name("ab").expect_err("ab").at(), 0..2);
        assert!(table_name("abc").is_ok());
    }

    #[test]
    fn a_wrong_address_is_pointed_at() {
        for (text, wrong_part) in [
            ("sqlite:a?durability=half", "durability=half"),
            ("redis:localhost", "redis"),
            ("limits.db", "limits.db"),
            ("memory:x", "x"),
            ("sqlite:", "sqlite:"),
        ] {
            assert_eq!(&text[store_url(text).expect_err(text).at()], wrong_part, "{text}");
        }
        for (text, wrong_part) in [
            // The same letters come again, or came before.
            ("dynamodb:us?region=us-east-1", 9..11),
            ("dynamodb:db", 9..11),
            ("dynamodb:ab?endpoint=http://ab:8000", 9..11),
            ("dynamodb:my-app?region=a&region=", 25..32),
            ("dynamodb:my-app?endpoint=x&region=us-east-1", 16..26),
            ("memory:memory", 7..13),
            ("ü:x", 0..2),
        ] {
            assert_eq!(store_url(text).expect_err(text).at(), wrong_part, "{text}");
        }
        assert!(store_url("sqlite:a/b.db").is_ok());
    }
}
