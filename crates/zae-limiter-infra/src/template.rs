//! The stack's template.

use crate::options::RetainTable;

/// The embedded template. Deleting the stack deletes the table.
pub const TEMPLATE: &str = include_str!("template.yaml");

/// The most bytes of a template that CloudFormation accepts in a request.
#[cfg(test)]
const BODY_MAX: usize = 51_200;

const DELETED: &str = "    Type: AWS::DynamoDB::Table\n    DeletionPolicy: Delete\n";
const RETAINED: &str = "    Type: AWS::DynamoDB::Table\n    DeletionPolicy: Retain\n";

/// The template, with the table's deletion policy. CloudFormation does not allow a parameter there.
pub fn template(retain: RetainTable) -> String {
    match retain {
        RetainTable::No => TEMPLATE.to_owned(),
        RetainTable::Yes => TEMPLATE.replacen(DELETED, RETAINED, 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_retained_on_request() {
        let (with, without) = (template(RetainTable::Yes), template(RetainTable::No));
        assert_eq!(without, TEMPLATE);
        let changed: Vec<(&str, &str)> =
            without.lines().zip(with.lines()).filter(|(a, b)| a != b).collect();
        assert_eq!(changed, [("    DeletionPolicy: Delete", "    DeletionPolicy: Retain")]);
    }

    #[test]
    fn the_template_is_small_enough_for_a_request() {
        assert!(TEMPLATE.len() < BODY_MAX, "{} bytes", TEMPLATE.len());
    }
}
