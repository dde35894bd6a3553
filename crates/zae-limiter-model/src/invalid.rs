use std::fmt;

/// The longest part of a rejected value that an error repeats.
const SHOWN_MAX: usize = 50;

/// The same for a rejected entity id. It may be an API key, and errors end up in logs.
const SECRET_SHOWN_MAX: usize = 6;

/// Input that breaks a rule: which field, what was given, and the rule.
///
/// ```
/// let error = zae_limiter_model::EntityId::new("a#b").unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "invalid entity id \"a#b\": use 1 to 256 of A-Z a-z 0-9 _ . - : @, \
///      starting with a letter or digit"
/// );
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Invalid {
    field: &'static str,
    value: String,
    rule: &'static str,
}

impl Invalid {
    /// An error about `value`, which is cut to 50 characters.
    pub fn new(field: &'static str, value: impl fmt::Display, rule: &'static str) -> Self {
        Self { field, value: cut(value.to_string(), SHOWN_MAX), rule }
    }

    /// An error about a `value` that may be a secret, which is cut to 6 characters.
    pub(crate) fn of_secret(field: &'static str, value: &str, rule: &'static str) -> Self {
        Self { field, value: cut(value.to_owned(), SECRET_SHOWN_MAX), rule }
    }

    /// The kind of value, for example `entity id`.
    pub fn field(&self) -> &'static str {
        self.field
    }

    /// The offending value, cut to 50 characters, and an entity id to 6.
    pub fn value(&self) -> &str {
        &self.value
    }

    /// What the value must look like.
    pub fn rule(&self) -> &'static str {
        self.rule
    }
}

fn cut(value: String, max: usize) -> String {
    match value.char_indices().nth(max) {
        Some((cut, _)) => format!("{}…", &value[..cut]),
        None => value,
    }
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "invalid {} {:?}: {}", self.field, self.value, self.rule)
    }
}

impl fmt::Debug for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Invalid {}
