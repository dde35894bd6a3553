//! Names that the stack gives to what it makes, and what is said about wrong ones.

use std::fmt;
use std::str::FromStr;

/// How much of a wrong value is shown.
const SHOWN_MAX: usize = 50;

/// An option that cannot be used as it is. Nothing was sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option}: {value:?} {rule}")]
pub struct InvalidOption {
    /// Which one, as it is called on the command line without the dashes.
    pub option: &'static str,
    /// What was given, cut short where it is long.
    pub value: String,
    /// What it has to be.
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

/// How names are made of the default ones: `{}` stands for the default name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameFormat {
    prefix: String,
    suffix: String,
}

impl NameFormat {
    /// What stands before the default name.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// What stands behind it.
    pub fn suffix(&self) -> &str {
        &self.suffix
    }

    /// The name for a default one.
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
            return wrong("may contain letters, digits and + = , . @ _ - beside {}");
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
    fn a_format_has_one_place_for_the_name() {
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
    fn arns_of_all_partitions_are_known() {
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
