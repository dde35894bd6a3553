//! Names, checked once when they are made.
//!
//! A name is a shared string: cloning one is a reference count, not a copy.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use crate::Invalid;
use crate::limit::RESERVED_LIMIT_NAMES;

/// The resource name of limits that apply to all resources of an entity.
pub const DEFAULT_RESOURCE: &str = "_default_";

/// The characters that a kind of name may contain.
struct Alphabet {
    length_max: usize,
    first: fn(u8) -> bool,
    rest: &'static [u8],
}

impl Alphabet {
    fn accepts(&self, text: &str) -> bool {
        let bytes = text.as_bytes();
        let Some(&first) = bytes.first() else {
            return false;
        };
        bytes.len() <= self.length_max
            && (self.first)(first)
            && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || self.rest.contains(byte))
    }
}

fn is_letter(byte: u8) -> bool {
    byte.is_ascii_alphabetic()
}

fn is_letter_or_digit(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
}

macro_rules! names {
    ($($(#[$doc:meta])* $name:ident, $field:literal, $invalid:ident, $rule:literal, $check:expr;)+) => {$(
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            #[doc = concat!("Checks the text: ", $rule, ".")]
            ///
            /// # Errors
            ///
            /// [`Invalid`], naming the value and the rule it breaks.
            pub fn new(text: impl AsRef<str>) -> Result<Self, Invalid> {
                let text = text.as_ref();
                let check: fn(&str) -> bool = $check;
                if check(text) {
                    Ok(Self(Arc::from(text)))
                } else {
                    Err(Invalid::$invalid($field, text, $rule))
                }
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl std::str::FromStr for $name {
            type Err = Invalid;

            fn from_str(text: &str) -> Result<Self, Invalid> {
                Self::new(text)
            }
        }
    )+};
}

names! {
    /// The id of an entity: an API key, a project, an organisation. Its `Debug` text is a short hash,
    /// because entity ids are often API keys.
    EntityId, "entity id", of_secret,
    "use 1 to 256 of A-Z a-z 0-9 _ . - : @, starting with a letter or digit",
    |text| Alphabet { length_max: 256, first: is_letter_or_digit, rest: b"_.-:@" }.accepts(text);

    /// The name of a limit, for example `rpm`.
    LimitName, "limit name", new,
    "use 1 to 64 of A-Z a-z 0-9 _ . -, starting with a letter, \
     and none of the names reserved for the store's own attributes (wcu, ttl, resource, window, …)",
    |text| Alphabet { length_max: 64, first: is_letter, rest: b"_.-" }.accepts(text)
        && !RESERVED_LIMIT_NAMES.contains(&text);

    /// The name of a resource, for example the model `gpt-4`.
    ResourceName, "resource", new,
    "use 1 to 64 of A-Z a-z 0-9 _ . - / :, starting with a letter \
     (_default_ stands for all resources of an entity, in its configuration only)",
    |text| Alphabet { length_max: 64, first: is_letter, rest: b"_.-/:" }.accepts(text);

    /// The name of a namespace.
    NamespaceName, "namespace", new,
    "use 1 to 64 of A-Z a-z 0-9 - _ ., starting with a letter",
    |text| Alphabet { length_max: 64, first: is_letter, rest: b"-_." }.accepts(text);

    /// The id of a namespace, under which its items are stored. Names can be reused, ids never are.
    NamespaceId, "namespace id", new,
    "use 11 of A-Z a-z 0-9 - _, not starting with a dash",
    |text| text.len() == 11 && !text.starts_with('-')
        && Alphabet { length_max: 11, first: |_| true, rest: b"-_" }.accepts(text);

    /// The name of a CloudFormation stack, and of its DynamoDB table.
    StackName, "stack name", new,
    "use 1 to 55 of A-Z a-z 0-9 -, starting with a letter",
    |text| Alphabet { length_max: 55, first: is_letter, rest: b"-" }.accepts(text);
}

macro_rules! debug_as_text {
    ($($name:ident),+) => {$(
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
    )+};
}

debug_as_text!(LimitName, ResourceName, NamespaceName, NamespaceId, StackName);

impl fmt::Debug for EntityId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "entity:{:08x}", self.short_hash())
    }
}

impl EntityId {
    /// A short, stable hash for logs, where the id itself must not appear.
    pub fn short_hash(&self) -> u32 {
        // FNV-1a, 32 bits: stable over releases and machines, so that logs can be compared.
        self.0
            .bytes()
            .fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_repeats_only_the_start_of_an_entity_id() {
        let error = EntityId::new("sk-live/0123456789").unwrap_err().to_string();
        assert!(error.contains("\"sk-liv…\"") && !error.contains("0123"), "{error}");
    }

    fn check<T: fmt::Debug + std::str::FromStr<Err = Invalid>>(good: &[&str], bad: &[&str]) {
        for text in good {
            assert!(text.parse::<T>().is_ok(), "{text:?} should be accepted");
        }
        for text in bad {
            let error = text.parse::<T>().expect_err(text);
            assert!(!error.rule().is_empty() && error.to_string().contains(error.field()));
        }
    }

    #[test]
    fn entity_ids_follow_their_rule() {
        let longest = "a".repeat(256);
        let too_long = "a".repeat(257);
        check::<EntityId>(
            &["a", "9", "sk-proj.1:a@b_c", &longest],
            &["", "-a", ".a", "a#b", "a b", "a/b", "ä", "a\n", &too_long],
        );
    }

    #[test]
    fn limit_names_follow_their_rule() {
        let longest = "a".repeat(64);
        let too_long = "a".repeat(65);
        check::<LimitName>(
            &["rpm", "tokens.per-minute_2", &longest],
            &["", "1rpm", "r:m", "r#m", "wcu", "ttl", "PK", "GSI1PK", "total_events", &too_long],
        );
    }

    #[test]
    fn resources_namespaces_and_stacks_follow_their_rules() {
        check::<ResourceName>(
            &["gpt-4", "models/gpt-4:beta", "a_default_"],
            &["", "_default_", "4gpt", "a#b", "a@b"],
        );
        check::<NamespaceName>(&["default", "team-a_1.x"], &["", "_", "1a", "a/b", "-a"]);
        check::<NamespaceId>(
            &["AbCdEfGhIj_", "_0123456789"],
            &["", "-bCdEfGhIjk", "short", "twelve-chars"],
        );
        check::<StackName>(&["my-app"], &["", "my_app", "1app", &"a".repeat(56)]);
    }

    #[test]
    fn an_entity_id_does_not_show_itself_in_debug_output() {
        let id = EntityId::new("sk-secret").unwrap();
        assert!(!format!("{id:?}").contains("secret"));
        assert_eq!(id.to_string(), "sk-secret");
    }

    #[test]
    fn a_long_value_is_cut_in_the_error() {
        let error = ResourceName::new("é".repeat(300)).unwrap_err();
        assert_eq!(error.value().chars().count(), 51);
    }
}
