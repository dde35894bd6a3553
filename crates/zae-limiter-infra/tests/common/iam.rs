//! Evaluates policies by the rules of IAM, as far as the template uses them. Anything else panics.

use serde_json::Value;

/// A request of a principal.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    /// For example `dynamodb:UpdateItem`.
    pub(crate) action: &'a str,
    /// The resource's ARN.
    pub(crate) resource: &'a str,
    /// The partition keys of the call, if it has any.
    pub(crate) leading_keys: &'a [String],
    /// The namespace id in the principal's tag.
    pub(crate) tag: Option<&'a str>,
}

/// Whether a policy document allows a request.
pub(crate) fn allows(document: &Value, request: &Request<'_>) -> bool {
    assert_eq!(document["Version"], "2012-10-17");
    let statements = document["Statement"].as_array().unwrap();
    let matching = statements.iter().filter(|statement| applies(statement, request));
    let mut allowed = false;
    for statement in matching {
        match statement["Effect"].as_str().unwrap() {
            "Allow" => allowed = true,
            "Deny" => return false,
            other => panic!("an effect {other}"),
        }
    }
    allowed
}

fn applies(statement: &Value, request: &Request<'_>) -> bool {
    for name in statement.as_object().unwrap().keys() {
        let known = ["Sid", "Effect", "Action", "Resource", "Condition"];
        assert!(known.contains(&name.as_str()), "{name} is not supported");
    }
    let action = texts(&statement["Action"]).iter().any(|one| like(one, request.action));
    let resource = texts(&statement["Resource"]).iter().any(|one| like(one, request.resource));
    let no_condition = Value::Null;
    let condition = statement.get("Condition").unwrap_or(&no_condition);
    action && resource && meets(condition, request)
}

fn meets(condition: &Value, request: &Request<'_>) -> bool {
    let Some(operators) = condition.as_object() else { return true };
    operators.iter().all(|(operator, keys)| {
        keys.as_object().unwrap().iter().all(|(key, wanted)| {
            assert_eq!(key, "dynamodb:LeadingKeys");
            match operator.as_str() {
                "Null" => request.leading_keys.is_empty() == (wanted == "true"),
                "ForAllValues:StringLike" => request.leading_keys.iter().all(|leading| {
                    let patterns = texts(wanted);
                    let patterns = patterns.iter().filter_map(|one| with_tag(one, request.tag));
                    patterns.into_iter().any(|pattern| like(&pattern, leading))
                }),
                other => panic!("{other} is not supported"),
            }
        })
    })
}

/// The pattern with the principal's tag inserted. `None` without the tag: it matches nothing.
fn with_tag(pattern: &str, tag: Option<&str>) -> Option<String> {
    const VARIABLE: &str = "${aws:PrincipalTag/zael_namespace_id}";
    match tag {
        Some(tag) => Some(pattern.replace(VARIABLE, tag)),
        None if pattern.contains("${") => None,
        None => Some(pattern.to_owned()),
    }
}

fn texts(value: &Value) -> Vec<String> {
    match value {
        Value::String(text) => vec![text.clone()],
        Value::Array(all) => all.iter().map(|one| one.as_str().unwrap().to_owned()).collect(),
        other => panic!("neither a string nor a list of strings: {other}"),
    }
}

/// Whether a text matches a pattern: `*` stands for any text, `?` for any character.
pub(crate) fn like(pattern: &str, text: &str) -> bool {
    match pattern.chars().next() {
        None => text.is_empty(),
        Some('*') => {
            let rest = &pattern[1..];
            (0..=text.len()).any(|at| text.is_char_boundary(at) && like(rest, &text[at..]))
        }
        Some(first) => text.chars().next().is_some_and(|other| {
            (first == '?' || first == other)
                && like(&pattern[first.len_utf8()..], &text[other.len_utf8()..])
        }),
    }
}
