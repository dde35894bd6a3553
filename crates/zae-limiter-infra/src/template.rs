//! The stack's template.

use crate::options::RetainTable;

/// The template as it is embedded. The table goes with the stack.
pub const TEMPLATE: &str = include_str!("template.yaml");

/// The most that CloudFormation takes of a template that is sent with the call.
#[cfg(test)]
const BODY_MAX: usize = 51_200;

const DELETED: &str = "    Type: AWS::DynamoDB::Table\n    DeletionPolicy: Delete\n";
const RETAINED: &str = "    Type: AWS::DynamoDB::Table\n    DeletionPolicy: Retain\n";

/// The template. What becomes of the table when the stack is deleted is the one thing that no
/// parameter can say.
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
    fn it_can_be_sent_with_the_call() {
        assert!(TEMPLATE.len() < BODY_MAX, "{} bytes", TEMPLATE.len());
    }
}
