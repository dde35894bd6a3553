//! Evaluates a template with its parameters, like CloudFormation.

use std::collections::BTreeMap;

use saphyr::{LoadableYamlNode as _, Scalar, Yaml};
use serde_json::{Map, Value, json};
use zae_limiter_infra::StackPlan;

/// An evaluated template.
pub(crate) struct Stack {
    /// All resources whose conditions hold, with all functions evaluated. A reference to another
    /// resource is `ref:Name` or `att:Name.Attribute`.
    pub(crate) resources: BTreeMap<String, Value>,
    /// All outputs whose conditions hold.
    pub(crate) outputs: BTreeMap<String, Value>,
}

impl Stack {
    pub(crate) fn of(plan: &StackPlan, code_key: &str) -> Self {
        let template = parse(&plan.template);
        let mut parameters: BTreeMap<String, String> = BTreeMap::new();
        for (name, definition) in template["Parameters"].as_object().unwrap() {
            if let Some(default) = definition.get("Default") {
                parameters.insert(name.clone(), text(default));
            }
        }
        for (name, value) in &plan.parameters {
            assert!(parameters.contains_key(name), "the template has no parameter {name}");
            parameters.insert(name.clone(), value.clone());
        }
        parameters.insert(StackPlan::CODE_KEY.to_owned(), code_key.to_owned());
        parameters.insert("AWS::StackName".to_owned(), plan.name.to_string());
        for (name, value) in
            [("Partition", "aws"), ("Region", "eu-west-1"), ("AccountId", "123456789012")]
        {
            parameters.insert(format!("AWS::{name}"), value.to_owned());
        }
        let rendering = Rendering { template: &template, parameters };
        Self { resources: rendering.section("Resources"), outputs: rendering.section("Outputs") }
    }

    pub(crate) fn properties(&self, name: &str) -> &Value {
        let resource = self.resources.get(name);
        &resource.unwrap_or_else(|| panic!("the stack has no resource {name}"))["Properties"]
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.resources.contains_key(name)
    }
}

pub(crate) fn parse(template: &str) -> Value {
    to_json(&Yaml::load_from_str(template).expect("YAML")[0])
}

fn to_json(yaml: &Yaml<'_>) -> Value {
    match yaml {
        Yaml::Value(Scalar::String(text)) => json!(text),
        Yaml::Value(Scalar::Integer(number)) => json!(number),
        Yaml::Value(Scalar::Boolean(is)) => json!(is),
        Yaml::Value(Scalar::Null) => Value::Null,
        Yaml::Sequence(all) => all.iter().map(to_json).collect(),
        Yaml::Mapping(all) => {
            let pair = |(key, value): (&Yaml<'_>, &Yaml<'_>)| (text(&to_json(key)), to_json(value));
            Value::Object(all.iter().map(pair).collect::<Map<_, _>>())
        }
        Yaml::Tagged(tag, inner) => {
            let name = match tag.suffix.as_str() {
                "Ref" => "Ref".to_owned(),
                other => format!("Fn::{other}"),
            };
            json!({ name: to_json(inner) })
        }
        other => panic!("unexpected in a template: {other:?}"),
    }
}

pub(crate) fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

struct Rendering<'a> {
    template: &'a Value,
    parameters: BTreeMap<String, String>,
}

impl Rendering<'_> {
    fn section(&self, name: &str) -> BTreeMap<String, Value> {
        let all = self.template[name].as_object().unwrap().iter();
        let wanted =
            all.filter(|(_, one)| one.get("Condition").is_none_or(|c| self.holds(&text(c))));
        wanted.map(|(name, one)| (name.clone(), self.value(one).unwrap())).collect()
    }

    fn holds(&self, condition: &str) -> bool {
        self.is_true(&self.template["Conditions"][condition])
    }

    fn is_true(&self, value: &Value) -> bool {
        let (function, arguments) = value.as_object().unwrap().iter().next().unwrap();
        let arguments = arguments.as_array().unwrap();
        match function.as_str() {
            "Fn::Equals" => self.value(&arguments[0]) == self.value(&arguments[1]),
            "Fn::Not" => !self.is_true(&arguments[0]),
            "Fn::And" => arguments.iter().all(|one| self.is_true(one)),
            "Fn::Or" => arguments.iter().any(|one| self.is_true(one)),
            other => panic!("{other} in a condition"),
        }
    }

    /// `None` for `AWS::NoValue`.
    fn value(&self, value: &Value) -> Option<Value> {
        match value {
            Value::Array(all) => Some(all.iter().filter_map(|one| self.value(one)).collect()),
            Value::Object(all) => {
                if let Some((function, argument)) = all.iter().next().filter(|_| all.len() == 1)
                    && (function == "Ref" || function.starts_with("Fn::"))
                {
                    return self.function(function, argument);
                }
                let pairs = all.iter().filter_map(|(k, v)| Some((k.clone(), self.value(v)?)));
                Some(Value::Object(pairs.collect()))
            }
            other => Some(other.clone()),
        }
    }

    fn function(&self, function: &str, argument: &Value) -> Option<Value> {
        match function {
            "Ref" if argument == "AWS::NoValue" => None,
            "Ref" => Some(Value::String(self.refer(&text(argument)))),
            "Fn::GetAtt" => Some(json!(format!("att:{}", text(argument)))),
            "Fn::Sub" => Some(Value::String(self.substitute(&text(argument)))),
            "Fn::If" => {
                let branch = if self.holds(&text(&argument[0])) { 1 } else { 2 };
                self.value(&argument[branch])
            }
            other => panic!("function {other} is not supported"),
        }
    }

    fn refer(&self, name: &str) -> String {
        if let Some(value) = self.parameters.get(name) {
            return value.clone();
        }
        assert!(
            self.template["Resources"].get(name).is_some(),
            "the template has no resource {name}"
        );
        format!("ref:{name}")
    }

    fn substitute(&self, pattern: &str) -> String {
        let (mut text, mut rest) = (String::new(), pattern);
        while let Some((before, after)) = rest.split_once("${") {
            let (name, behind) = after.split_once('}').unwrap();
            text.push_str(before);
            match name.split_once('.') {
                Some(_) => text.push_str(&format!("att:{name}")),
                None => text.push_str(&self.refer(name)),
            }
            rest = behind;
        }
        text + rest
    }
}
