//! Checks names and ARNs, and builds the names of roles and policies.

use std::fmt;
use std::str::FromStr;

/// The most characters of an invalid value that an error shows.
const SHOWN_MAX: usize = 50;

/// An invalid option. Nothing was sent to AWS.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option}: {value:?} {rule}")]
pub struct InvalidOption {
    /// The option's name on the command line, without dashes.
    pub option: &'static str,
    /// The value, cut to 50 characters.
    pub value: String,
    /// The rule that the value breaks.
    pub rule: String,
}

impl InvalidOption {
    pub(crate) fn new(option: &'static str, value: impl fmt::Display, rule: &str) -> Self {
        let mut value = value.to_string();
        if let Some((at, _)) = value.char_indices().nth(SHOWN_MAX) {
            value.truncate(at);
            value.push('…');
        }
        Self { option, value, rule: rule.to_owned() }
    }
}

/// A pattern for names. `{}` stands for the default name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameFormat {
    prefix: String,
    suffix: String,
}

impl NameFormat {
    /// The text before the default name.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The text after the default name.
    pub fn suffix(&self) -> &str {
        &self.suffix
    }

    /// The name that replaces a default one.
    pub fn apply(&self, name: &str) -> String {
        format!("{}{name}{}", self.prefix, self.suffix)
    }
}

impl FromStr for NameFormat {
    type Err = InvalidOption;

    fn from_str(text: &str) -> Result<Self, InvalidOption> {
        let wrong = |rule| Err(InvalidOption::new("name format", text, rule));
        let Some((prefix, suffix)) = text.split_once("{}") else {
            return wrong("must contain {}, which stands for the default name");
        };
        if suffix.contains("{}") {
            return wrong("must contain {} exactly once");
        }
        let is_legal = |c: char| c.is_ascii_alphanumeric() || "+=,.@_-".contains(c);
        if !prefix.chars().chain(suffix.chars()).all(is_legal) {
            return wrong("may contain only {}, letters, digits and + = , . @ _ -");
        }
        Ok(Self { prefix: prefix.to_owned(), suffix: suffix.to_owned() })
    }
}

/// Whether a text is an ARN of that service, in any partition, whose resource begins with `kind`.
pub(crate) fn is_arn(text: &str, service: &str, kind: &str) -> bool {
    let parts: Vec<&str> = text.splitn(6, ':').collect();
    let [arn, partition, named, region, account, resource] = parts[..] else { return false };
    let is_account = |text: &str| text == "aws" || is_account_id(text);
    let is_place = match service {
        "iam" => region.is_empty() && is_account(account),
        _ => !region.is_empty() && is_account_id(account),
    };
    arn == "arn"
        && (partition == "aws" || partition.starts_with("aws-"))
        && named == service
        && is_place
        && resource.len() > kind.len()
        && resource.starts_with(kind)
        && !resource.contains(char::is_whitespace)
}

fn is_account_id(text: &str) -> bool {
    text.len() == 12 && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_contains_the_name_exactly_once() {
        let format: NameFormat = "corp-{}-x".parse().unwrap();
        assert_eq!(format.apply("app-acq"), "corp-app-acq-x");
        for (wrong, word) in
            [("corp", "contain {}"), ("{}{}", "exactly once"), ("a b{}", "letters"), ("", "{}")]
        {
            let error = wrong.parse::<NameFormat>().expect_err(wrong).to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn arns_of_all_partitions_are_accepted() {
        assert!(is_arn("arn:aws:iam::123456789012:role/x", "iam", "role/"));
        assert!(is_arn("arn:aws-us-gov:iam::123456789012:role/path/x", "iam", "role/"));
        assert!(is_arn("arn:aws-cn:sns:cn-north-1:123456789012:topic", "sns", ""));
        assert!(is_arn("arn:aws:iam::aws:policy/PowerUserAccess", "iam", "policy/"));
        for wrong in [
            "arn:aws:iam::123456789012:role/",
            "arn:aws:iam::123456789012:user/x",
            "arn:aws:iam::12345678901:role/x",
            "arn:aws:iam:eu-west-1:123456789012:role/x",
            "arn:gcp:iam::123456789012:role/x",
            "role/x",
        ] {
            assert!(!is_arn(wrong, "iam", "role/"), "{wrong}");
        }
        assert!(!is_arn("arn:aws:sns::123456789012:topic", "sns", ""));
    }
}
